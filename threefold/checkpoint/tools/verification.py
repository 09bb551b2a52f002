"""`threefold checkpoint verify`: every byte of a checkpoint compared with its checksums."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.format.index import StoredTensor, TensorChunk, read_data_files
from threefold.checkpoint.format.storage import read_chunk, stored_index
from threefold.checkpoint.manifest import PARTIAL, Manifest, read_manifest
from threefold.checkpoint.tools.listing import check
from threefold.checkpoint.tools.locate import Named, checkpoint_folders
from threefold.checksums import checksum
from threefold.data.progress import Progress
from threefold.errors import UserError
from threefold.files import shown

_THREADS = 4


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint that is as it was written.

    Attributes:
        files: compared, the manifest among them.
        bytes: compared.
        tensors: in them.
    """

    files: int
    bytes: int
    tensors: int


def to_verify(named: Named) -> list[Path]:
    """The checkpoint that was named, or all of a run that are not being written, the oldest first.

    Raises:
        UserError: a run has no other.
    """
    if named.checkpoint is not None:
        return [named.checkpoint]
    found = [path for path in checkpoint_folders(named.run) if not path.name.endswith(PARTIAL)]
    if not found:
        raise UserError(f"{shown(named.run)} has no complete checkpoint to verify; give a run that has one.")
    return found


def verify_checkpoint(path: Path, progress: Progress) -> VerifiedCheckpoint:
    """Read a whole checkpoint, and compare it with its checksums.

    Of version 1, whose files have none, the CRC-32 of each part of a tensor is compared.

    Raises:
        DamagedCheckpoint: a file is missing, or not as it was written; the reason names it, and a tensor in it.
        UserError: a later version of Threefold wrote it.
    """
    manifest = read_manifest(path)
    total = sum(file.bytes for file in manifest.files.values())
    progress.phase(path.name, total)
    check(path, manifest)
    index = stored_index(path)
    by_file: dict[str, dict[TensorChunk, str]] = {}
    for name, tensor in index.items():
        for chunk in tensor.chunks:
            by_file.setdefault(chunk.file, {})[chunk] = name
    if any(file.checksum is None for file in manifest.files.values()):
        _read_all(path, manifest, index, by_file, progress)
    else:
        _require_same_record(path, manifest)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="threefold-checksum") as pool:
            parts = ((manifest, name, index, by_file.get(name, {}), progress) for name in sorted(manifest.files))
            for damage in pool.map(lambda part: _damage(*part), parts):
                if damage is not None:
                    raise damage
    return VerifiedCheckpoint(len(manifest.files) + 1, total, len(index))


def _damage(
    manifest: Manifest,
    name: str,
    index: Mapping[str, StoredTensor],
    chunks: Mapping[TensorChunk, str],
    progress: Progress,
) -> DamagedCheckpoint | None:
    """What is damaged in a file: of tensors the first of them, where it is in one."""
    try:
        found = checksum(manifest.folder / name, progress.advance)
    except OSError as error:
        return DamagedCheckpoint(manifest.folder, f"its {shown(name)} cannot be read ({error.strerror})")
    if found == manifest.files[name].checksum:
        return None
    reason = f"its {shown(name)} does not have the checksum that it was written with"
    return DamagedCheckpoint(manifest.folder, reason + _where(manifest.folder / name, index, chunks))


def _where(path: Path, index: Mapping[str, StoredTensor], chunks: Mapping[TensorChunk, str]) -> str:
    """The tensors of a damaged file whose bytes are others, as the end of a clause."""
    damaged: dict[str, None] = {}
    try:
        with path.open("rb", buffering=0) as file:
            for chunk in sorted(chunks, key=lambda each: each.position):
                try:
                    read_chunk(file, path.parent, index[chunks[chunk]], chunk)
                except DamagedCheckpoint:
                    damaged[chunks[chunk]] = None
    except OSError:
        return ""
    if not damaged:
        return ""
    first, *others = damaged
    return f", in the tensor {shown(first)}" + (f" and {len(others)} more" if others else "")


def _require_same_record(path: Path, manifest: Manifest) -> None:
    """Check that index and manifest have the same checksum of every file of tensors."""
    for name, file in read_data_files(path).items():
        if name not in manifest.files or manifest.files[name].checksum != file.checksum:
            raise DamagedCheckpoint(path, f"its index and its manifest are of another {shown(name)}")


def _read_all(
    path: Path,
    manifest: Manifest,
    index: Mapping[str, StoredTensor],
    by_file: Mapping[str, Mapping[TensorChunk, str]],
    progress: Progress,
) -> None:
    """Read every tensor of a checkpoint of version 1."""
    for name in sorted(manifest.files):
        if name not in by_file:
            progress.advance(manifest.files[name].bytes)
            continue
        try:
            with (path / name).open("rb", buffering=0) as file:
                for chunk in sorted(by_file[name], key=lambda each: each.position):
                    read_chunk(file, path, index[by_file[name][chunk]], chunk)
                    progress.advance(chunk.bytes)
        except OSError as error:
            raise DamagedCheckpoint(path, f"its {shown(name)} cannot be read ({error.strerror})") from None

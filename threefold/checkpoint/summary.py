"""Content of a checkpoint (`threefold checkpoint show`) and its verification (`threefold checkpoint verify`)."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from threefold.checkpoint.errors import MODEL, OPTIMIZER, DamagedCheckpoint
from threefold.checkpoint.folder import LOOP, folders, stored_config
from threefold.checkpoint.index import StoredTensor, TensorChunk, read_data_files
from threefold.checkpoint.listing import ListedCheckpoint, Named, check, checkpoint_folders, listed
from threefold.checkpoint.manifest import PARTIAL, Manifest, read_manifest
from threefold.checkpoint.selection import Damaged, listed_damage, passed_over
from threefold.checkpoint.storage import read_chunk, stored_index
from threefold.checksums import checksum
from threefold.config import Config
from threefold.errors import UserError
from threefold.files import shown
from threefold.output import Progress


@dataclass(frozen=True)
class TensorGroup:
    """Totals of a group of tensors: their number, elements, bytes, and dtypes by decreasing size."""

    tensors: int
    elements: int
    bytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointSummary:
    """Content of a checkpoint.

    Attributes:
        listed: entry of the checkpoint in a list.
        version: version of the checkpoint format.
        config: config of the run; None for a custom training loop.
        tensors: tensors by name, weights first, in the order of the layers.
        states: totals of each optimizer state, such as exp_avg.
        others: totals of the other tensors, such as random streams.
        files: sizes of the files by name.
        warnings: a sentence about newer checkpoints that were skipped.
    """

    listed: ListedCheckpoint
    version: int
    config: Config | None
    tensors: Mapping[str, StoredTensor]
    weights: TensorGroup
    states: Mapping[str, TensorGroup]
    others: TensorGroup
    files: Mapping[str, int]
    warnings: tuple[str, ...] = ()

    def matching(self, pattern: str | None) -> dict[str, StoredTensor]:
        """Return the tensors whose name matches a pattern, or contains it if it has no `*`, `?` or `[`.

        Raises:
            UserError: no name matches; the message gives an existing name.
        """
        if pattern is None:
            return dict(self.tensors)
        whole = pattern if any(letter in pattern for letter in "*?[") else f"*{pattern}*"
        found = {name: tensor for name, tensor in self.tensors.items() if fnmatchcase(name, whole)}
        if not found:
            raise UserError(
                f"{shown(self.listed.path)} has no tensor whose name matches {shown(pattern)}; there is "
                f"{shown(next(iter(self.tensors), 'none'))}."
            )
        return found

    def document(self, pattern: str | None, with_tensors: bool) -> dict[str, Any]:
        """Return the summary as a JSON object."""
        facts = self.listed.facts
        found: dict[str, Any] = {
            **self.listed.document(),
            "format_version": self.version,
            "seed": facts.seed if facts else None,
            "loss_scale": facts.loss_scale if facts else None,
            "tokens": facts.tokens if facts else None,
            "documents": facts.documents if facts else None,
            "parameters": self.weights.elements,
            "weights": vars(self.weights) | {"dtypes": list(self.weights.dtypes)},
            "optimizer_states": {
                name: vars(group) | {"dtypes": list(group.dtypes)} for name, group in self.states.items()
            },
            "config": self.config.sections() if self.config else None,
            "files": dict(self.files),
        }
        if with_tensors:
            found["tensors"] = {
                name: {
                    "shape": list(tensor.shape),
                    "dtype": dtype_name(tensor),
                    "bytes": bytes_of(tensor),
                    "files": sorted({chunk.file for chunk in tensor.chunks}),
                }
                for name, tensor in self.matching(pattern).items()
            }
        return found


def choose(named: Named, damaged: Damaged | None = None) -> tuple[Path, tuple[str, ...]]:
    """Return the named checkpoint or a run's newest valid one, and warnings about the ones skipped.

    Args:
        damaged: checkpoints of the run whose tensors were found damaged.

    Raises:
        UserError: the run has no valid checkpoint.
    """
    if named.checkpoint is not None:
        return named.checkpoint, ()
    passed: list[DamagedCheckpoint] = []
    for path in reversed(folders(named.run)):
        try:
            if damaged and path in damaged:
                raise DamagedCheckpoint(path, damaged[path])
            check(path, read_manifest(path))
        except DamagedCheckpoint as damage:
            passed.append(damage)
            continue
        return path, (passed_over(passed, path),) if passed else ()
    why = f" ({listed_damage(passed)} passed over)" if passed else ""
    raise UserError(f"{shown(named.run)} has no complete checkpoint{why}; give a run that has one.")


def summarize_checkpoint(path: Path, warnings: tuple[str, ...] = ()) -> CheckpointSummary:
    """Summarize a checkpoint without reading its tensors; raise DamagedCheckpoint if it is visibly damaged."""
    one = listed(path)
    if one.state == "damaged":
        raise DamagedCheckpoint(path, one.reason)
    manifest, index = read_manifest(path), stored_index(path)
    tensors = {name: index[name] for name in sorted(index, key=_place)}
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    states: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(OPTIMIZER):
            states.setdefault(name.rpartition(".")[2], {})[name] = tensor
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith((MODEL, OPTIMIZER))}
    return CheckpointSummary(
        one,
        1 if any(file.checksum is None for file in manifest.files.values()) else 2,
        None if LOOP in manifest.files else stored_config(path, with_code=True),  # which is shown, and not run
        tensors,
        _group(weights),
        {name: _group(found) for name, found in states.items()},
        _group(others),
        {name: manifest.files[name].bytes for name in sorted(manifest.files)},
        warnings,
    )


def dtype_name(tensor: StoredTensor) -> str:
    """Return torch's name for the dtype of a tensor."""
    return str(tensor.dtype).removeprefix("torch.")


def bytes_of(tensor: StoredTensor) -> int:
    """Return the size of a tensor in bytes."""
    return prod(tensor.shape) * tensor.dtype.itemsize


def _group(tensors: Mapping[str, StoredTensor]) -> TensorGroup:
    dtypes: dict[str, int] = {}
    for tensor in tensors.values():
        dtypes[dtype_name(tensor)] = dtypes.get(dtype_name(tensor), 0) + bytes_of(tensor)
    order = tuple(sorted(dtypes, key=lambda name: -dtypes[name]))
    elements = sum(prod(tensor.shape) for tensor in tensors.values())
    return TensorGroup(len(tensors), elements, sum(dtypes.values()), order)


def _place(name: str) -> tuple[int, tuple[tuple[int, int, str], ...]]:
    """Return a sort key: weights, optimizer state, others; numbers in names by value, so layer 10 follows layer 9."""
    kind = 0 if name.startswith(MODEL) else 1 if name.startswith(OPTIMIZER) else 2
    return kind, tuple(_parts(name))


def _parts(name: str) -> Iterator[tuple[int, int, str]]:
    order = {"embed": 0, "blocks": 1, "head": 2}
    for part in name.split("."):
        yield (0, int(part), "") if part.isdigit() else (1, order.get(part, 1), part)


_THREADS = 4


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """Totals of a checkpoint found intact: files compared (including the manifest), their bytes, and tensors."""

    files: int
    bytes: int
    tensors: int


def to_verify(named: Named) -> list[Path]:
    """Return the named checkpoint, or all finished ones of a run, oldest first; raise UserError if there are none."""
    if named.checkpoint is not None:
        return [named.checkpoint]
    found = [path for path in checkpoint_folders(named.run) if not path.name.endswith(PARTIAL)]
    if not found:
        raise UserError(f"{shown(named.run)} has no complete checkpoint to verify; give a run that has one.")
    return found


def verify_checkpoint(path: Path, progress: Progress) -> VerifiedCheckpoint:
    """Read a whole checkpoint and compare it with its checksums.

    Files of version 1 have none; the CRC-32 of each part of a tensor is compared instead.

    Raises:
        DamagedCheckpoint: a file is missing or was changed; the reason names it and a tensor in it.
        UserError: a later version of Threefold wrote the checkpoint.
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
    """Return the damage of a file, if any, naming the first damaged tensor."""
    try:
        found = checksum(manifest.folder / name, progress.advance)
    except OSError as error:
        return DamagedCheckpoint(manifest.folder, f"its {shown(name)} cannot be read ({error.strerror})")
    if found == manifest.files[name].checksum:
        return None
    reason = f"its {shown(name)} does not have the checksum that it was written with"
    return DamagedCheckpoint(manifest.folder, reason + _where(manifest.folder / name, index, chunks))


def _where(path: Path, index: Mapping[str, StoredTensor], chunks: Mapping[TensorChunk, str]) -> str:
    """Return the damaged tensors of a file, as the end of a clause."""
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
    """Check that index and manifest agree on the checksum of every tensor file."""
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

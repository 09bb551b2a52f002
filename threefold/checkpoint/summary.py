"""Content of a checkpoint (`threefold checkpoint show`) and its verification (`threefold checkpoint verify`)."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from threefold.checkpoint.errors import MODEL, OPTIMIZER, DamagedCheckpoint
from threefold.checkpoint.folder import LOOP, stored_config
from threefold.checkpoint.index import StoredTensor, TensorChunk, read_data_files, read_index
from threefold.checkpoint.listing import ListedCheckpoint, Named, check, checkpoint_folders, listed
from threefold.checkpoint.manifest import PARTIAL, VERSION, Manifest, read_manifest
from threefold.checkpoint.selection import Damaged, newest_valid
from threefold.checkpoint.tensors import read_chunk
from threefold.config import Config
from threefold.errors import UserError
from threefold.files import checksum, shown
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
        config: config of the run; None for a custom training loop.
        tensors: tensors by name, weights first, in the order of the layers.
        states: totals of each optimizer state, such as exp_avg.
        others: totals of the other tensors, such as random streams.
        files: sizes of the files by name.
        warnings: a sentence about newer checkpoints that were skipped.
    """

    listed: ListedCheckpoint
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
            "format_version": VERSION,
            "seed": facts.seed if facts else None,
            "loss_scale": facts.loss_scale if facts else None,
            "tokens": facts.tokens if facts else None,
            "documents": facts.documents if facts else None,
            "parameters": self.weights.elements,
            "weights": vars(self.weights),
            "optimizer_states": {name: vars(group) for name, group in self.states.items()},
            "config": self.config.sections() if self.config else None,
            "files": dict(self.files),
        }
        if with_tensors:
            found["tensors"] = {
                name: {
                    "shape": list(tensor.shape),
                    "dtype": tensor.dtype_name,
                    "bytes": tensor.bytes,
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

    def inspect(path: Path) -> Path:
        check(path, read_manifest(path))
        return path

    run = shown(named.run)
    return newest_valid(named.run, inspect, lambda none: f"{run} has {none}; give a run that has one.", damaged)[:2]


def summarize_checkpoint(path: Path, warnings: tuple[str, ...] = ()) -> CheckpointSummary:
    """Summarize a checkpoint without reading its tensors; raise DamagedCheckpoint if it is visibly damaged."""
    one = listed(path)
    if one.state == "damaged":
        raise DamagedCheckpoint(path, one.reason)
    manifest, index = read_manifest(path), read_index(path)
    tensors = {name: index[name] for name in sorted(index, key=_place)}
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    states: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(OPTIMIZER):
            states.setdefault(name.rpartition(".")[2], {})[name] = tensor
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith((MODEL, OPTIMIZER))}
    return CheckpointSummary(
        one,
        None if LOOP in manifest.files else stored_config(path, with_code=True),  # which is shown, and not run
        tensors,
        group_of(weights),
        {name: group_of(found) for name, found in states.items()},
        group_of(others),
        {name: manifest.files[name].bytes for name in sorted(manifest.files)},
        warnings,
    )


def group_of(tensors: Mapping[str, StoredTensor]) -> TensorGroup:
    """Return the totals of some tensors."""
    dtypes: dict[str, int] = {}
    for tensor in tensors.values():
        dtypes[tensor.dtype_name] = dtypes.get(tensor.dtype_name, 0) + tensor.bytes
    order = tuple(sorted(dtypes, key=lambda name: -dtypes[name]))
    elements = sum(prod(tensor.shape) for tensor in tensors.values())
    return TensorGroup(len(tensors), elements, sum(dtypes.values()), order)


def _place(name: str) -> tuple[int, list[tuple[int, int, str]]]:
    """Return a sort key: weights, optimizer state, others; numbers in names by value, so layer 10 follows layer 9."""
    kind = 0 if name.startswith(MODEL) else 1 if name.startswith(OPTIMIZER) else 2
    order = {"embed": 0, "blocks": 1, "head": 2}
    parts = name.split(".")
    return kind, [(0, int(part), "") if part.isdigit() else (1, order.get(part, 1), part) for part in parts]


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

    Raises:
        DamagedCheckpoint: a file is missing or was changed; the reason names it and a tensor in it.
        UserError: a later version of Threefold wrote the checkpoint.
    """
    manifest = read_manifest(path)
    total = sum(file.bytes for file in manifest.files.values())
    progress.phase(path.name, total)
    check(path, manifest)
    index = read_index(path)
    by_file: dict[str, dict[TensorChunk, str]] = {}
    for name, tensor in index.items():
        for chunk in tensor.chunks:
            by_file.setdefault(chunk.file, {})[chunk] = name
    for name, file in read_data_files(path).items():
        if name not in manifest.files or manifest.files[name].checksum != file.checksum:
            raise DamagedCheckpoint(path, f"its index and its manifest are of another {shown(name)}")

    def damage(name: str) -> DamagedCheckpoint | None:
        return _damage(manifest, name, index, by_file.get(name, {}), progress)

    with ThreadPoolExecutor(4, thread_name_prefix="threefold-checksum") as pool:
        for found in pool.map(damage, sorted(manifest.files)):
            if found is not None:
                raise found
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
    damaged: dict[str, None] = {}
    with suppress(OSError), (manifest.folder / name).open("rb", buffering=0) as file:
        for chunk in sorted(chunks, key=lambda each: each.position):
            try:
                read_chunk(file, manifest.folder, index[chunks[chunk]], chunk)
            except DamagedCheckpoint:
                damaged[chunks[chunk]] = None
    reason = f"its {shown(name)} does not have the checksum that it was written with"
    for first in list(damaged)[:1]:
        reason += f", in the tensor {shown(first)}" + (f" and {len(damaged) - 1} more" if len(damaged) > 1 else "")
    return DamagedCheckpoint(manifest.folder, reason)

"""Lookup, listing, content and verification of a run's checkpoints, for `threefold checkpoint`."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

from threefold.checkpoint.errors import AVERAGE, CHANGED, MODEL, OPTIMIZER, DamagedCheckpoint
from threefold.checkpoint.folder import (
    DIVERGED,
    FOLDER,
    LOOP,
    NAMED,
    Damaged,
    check_files,
    checkpoint_folders,
    inspect_checkpoint,
    newest_valid,
    step_of,
    stored_config,
)
from threefold.checkpoint.index import StoredTensor, read_data_files, read_fingerprint, read_index
from threefold.checkpoint.manifest import (
    MANIFEST,
    PARTIAL,
    VERSION,
    Checkpoint,
    Facts,
    WriterRecord,
    read_manifest,
    read_writer,
)
from threefold.checksums import checksum_of_file
from threefold.config import Config
from threefold.errors import UserError
from threefold.files import first_of, shown
from threefold.foreign import FolderFiles
from threefold.output import Progress

_DEPTH: Final = 3  # levels of folders searched for a run, below the given folder and above it


@dataclass(frozen=True)
class Named:
    """A run's folder, and the folder of a checkpoint unless a path names the run itself."""

    run: Path
    checkpoint: Path | None = None


def locate(path: Path) -> Named:
    """Return the run or checkpoint that a path names; raise UserError, with the nearest run, if it names neither."""
    if path.is_dir() and (NAMED.fullmatch(path.resolve().name) or FolderFiles(path).holds(MANIFEST)):
        found = path if NAMED.fullmatch(path.name) else path.resolve()  # such as `.`
        return Named(found.absolute().parent.parent, found)
    if checkpoint_folders(path):
        return Named(path)
    if path.name == FOLDER and checkpoint_folders(path.parent):
        return Named(path.parent)
    nearest = _nearest(path)
    reason = f"not a folder of a run: it has no {FOLDER}/step_…"
    if not path.is_dir():
        reason = "a file" if path.is_file() else "not there"
    elif (path / FOLDER).is_dir():
        reason = "a run without checkpoints so far"
    advice = f"the nearest run is {shown(nearest)}" if nearest else "give a run folder, as for --run-dir"
    raise UserError(f"{shown(path)} is {reason}; {advice}.")


def _nearest(path: Path) -> Path | None:
    """Return the nearest run above or below a path, or below its nearest existing parent; the closest name wins."""
    for above in (path, *list(path.absolute().parents)[:_DEPTH]):
        if checkpoint_folders(above):
            return above
    exists = next((each for each in (path, *path.absolute().parents) if each.is_dir()), None)
    if exists is None or exists.absolute() == Path(exists.absolute().anchor):
        return None
    runs = _below(exists)
    if not runs or exists == path:
        return runs[0] if runs else None
    close = get_close_matches(str(path.absolute()), [str(run) for run in runs], n=1, cutoff=0)
    return Path(close[0]) if close else None


def _below(folder: Path) -> list[Path]:
    level, found, seen, most = [folder], list[Path](), 0, 2000
    for _ in range(_DEPTH):
        inner: list[Path] = []
        for parent in level:
            with suppress(OSError):
                inner += sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))
            if seen + len(inner) > most:
                break
        found = [child for child in inner if (child / FOLDER).is_dir() and checkpoint_folders(child)]
        level, seen = inner, seen + len(inner)
        if found or seen > most:
            break
    return found


State = Literal["complete", "damaged", "partial", "diverged"]
"""Complete as far as can be seen without reading tensors; partial while it is written, or if that was interrupted."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """An entry in a list of checkpoints."""

    path: Path
    step: int
    state: State
    reason: str  # the damage, as a clause; empty in other states
    bytes: int
    saved: datetime | None  # for an imported one, when the manifest last changed
    facts: Facts | None  # None if unreadable
    writer: WriterRecord

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the weights, the same in every layout; None if it is not known."""
        return (self.facts and self.facts.fingerprint) or read_fingerprint(self.path)

    @property
    def layout(self) -> str:
        """Layout of the writer on one line, or `imported` for an imported model."""
        if self.facts is not None and self.facts.step == 0 and not self.facts.documents and not self.writer.versions:
            return "imported"
        return str(self.writer)

    def document(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "step": self.step,
            "state": self.state,
            "reason": self.reason,
            "bytes": self.bytes,
            "saved": self.saved.isoformat(timespec="seconds") if self.saved else None,
            "fingerprint": self.fingerprint,
            "consumed_samples": self.facts.consumed_samples if self.facts else None,
            **({"measured": dict([self.facts.measured])} if self.facts and self.facts.measured else {}),
            "layout": None if self.writer.layout is None else dict(self.writer.layout),
            "ranks": self.writer.ranks,
            "versions": dict(self.writer.versions),
            "weights_only": self.writer.weights_only,
        }


def listed(path: Path) -> ListedCheckpoint:
    """Return a checkpoint's list entry, whatever its state; all but the bytes of tensors is checked, without torch."""
    state: State = "complete"
    reason, facts = "", None
    try:
        facts = read_manifest(path).facts
        check(path, with_model=False)
        if path.name.endswith(DIVERGED):
            state = "diverged"
    except DamagedCheckpoint as damage:
        state, reason = "damaged", damage.reason
    except UserError as error:  # another version of the format
        state, reason = "damaged", str(error).removesuffix(".")
    if path.name.endswith(PARTIAL):
        state, reason = "partial", ""
    writer, size = read_writer(path), 0
    with suppress(OSError):  # the folder vanished
        for entry in os.scandir(path):
            with suppress(OSError):  # this file did
                size += entry.stat(follow_symlinks=False).st_size if entry.is_file(follow_symlinks=False) else 0
    return ListedCheckpoint(path, step_of(path), state, reason, size, saved_at(path, writer), facts, writer)


def saved_at(path: Path, writer: WriterRecord) -> datetime | None:
    """Return when a checkpoint was saved; for an imported one, when its manifest or folder last changed."""
    if writer.saved is not None:
        return writer.saved
    for each in (path / MANIFEST, path):
        with suppress(OSError, OverflowError, ValueError):
            return datetime.fromtimestamp(each.stat().st_mtime, UTC)
    return None


def check(path: Path, with_model: bool = True) -> Checkpoint:
    """Check all of a run's or custom loop's checkpoint but tensor bytes; raise DamagedCheckpoint if it fails.

    Without `with_model`, which imports torch, of the model only the sizes are compared with the tensors.
    """
    manifest = read_manifest(path)
    if LOOP in manifest.files:
        check_files(path)
    else:
        inspect_checkpoint(path, with_model=with_model)
    return manifest


@dataclass(frozen=True)
class TensorGroup:
    """Totals of a group of tensors: their number, elements, bytes, and dtypes by decreasing size."""

    tensors: int
    elements: int
    bytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class CheckpointSummary:
    """Content of a checkpoint."""

    listed: ListedCheckpoint
    config: Config | None  # None for a custom training loop
    tensors: Mapping[str, StoredTensor]  # weights first, in the order of the layers
    weights: TensorGroup
    states: Mapping[str, TensorGroup]  # of each optimizer state, such as exp_avg
    averages: TensorGroup  # moving averages of the weights
    others: TensorGroup  # such as random streams
    files: Mapping[str, int]  # sizes by name
    warnings: tuple[str, ...] = ()  # a sentence about newer checkpoints that were skipped

    def matching(self, pattern: str | None) -> dict[str, StoredTensor]:
        """Return the tensors whose name matches a pattern, or contains it if it has no `*`, `?` or `[`."""
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
            found["tensors"] = tensors = {}
            for name, tensor in self.matching(pattern).items():
                size, files = tensor.bytes, sorted({chunk.file for chunk in tensor.chunks})
                tensors[name] = {"shape": [*tensor.shape], "dtype": tensor.dtype_name, "bytes": size, "files": files}
        return found


def choose(named: Named, damaged: Damaged | None = None) -> tuple[Path, tuple[str, ...]]:
    """Return the named checkpoint or a run's newest valid one that is not `damaged`, and warnings of skipped ones."""
    if named.checkpoint is not None:
        return named.checkpoint, ()

    checkpoint, warnings, _ = newest_valid(named.run, check, shown(named.run), "; give a run that has one", damaged)
    return checkpoint.path, warnings


def summarize_checkpoint(path: Path, warnings: tuple[str, ...] = ()) -> CheckpointSummary:
    """Summarize a checkpoint without reading its tensors; raise DamagedCheckpoint if it is visibly damaged."""
    one = listed(path)
    if one.state == "damaged":
        raise DamagedCheckpoint(path, one.reason)
    manifest, index = check(path), read_index(path)
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
        group_of({name: tensor for name, tensor in others.items() if name.startswith(AVERAGE)}),
        group_of({name: tensor for name, tensor in others.items() if not name.startswith(AVERAGE)}),
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
    """Compare a checkpoint with its checksums; DamagedCheckpoint names a file and a tensor in it."""
    from threefold.checkpoint.tensors import read_chunk

    manifest = read_manifest(path)
    total = sum(file.bytes for file in manifest.files.values())
    progress.phase(path.name, total)
    check(path)
    index, files = read_index(path), FolderFiles(path)
    for name, file in read_data_files(path).items():
        if name not in manifest.files or manifest.files[name].checksum != file.checksum:
            raise DamagedCheckpoint(path, f"its index and its manifest are of another {shown(name)}")

    def damage(name: str) -> str | None:
        """Return the damage of a file, if any, naming the first damaged tensor in it."""
        try:
            with files.opened(name) as file:
                found = checksum_of_file(file, progress.advance)
            if found == manifest.files[name].checksum:
                return None
        except OSError as error:
            return f"its {shown(name)} cannot be read ({error.strerror})"
        reason = f"its {shown(name)} {CHANGED}"
        here = ((chunk, tensor) for tensor, each in index.items() for chunk in each.chunks if chunk.file == name)
        damaged: dict[str, None] = {}
        with suppress(OSError), files.opened(name) as file:
            for chunk, tensor in sorted(here, key=lambda found: found[0].position):
                try:
                    read_chunk(file, path, index[tensor], chunk)
                except DamagedCheckpoint:
                    damaged[tensor] = None
        return f"{reason}, in the tensor {first_of(map(shown, damaged), 1)}" if damaged else reason

    with ThreadPoolExecutor(4, thread_name_prefix="threefold-checksum") as pool:
        for reason in pool.map(damage, sorted(manifest.files)):
            if reason is not None:
                raise DamagedCheckpoint(path, reason)
    return VerifiedCheckpoint(len(manifest.files) + 1, total, len(index))

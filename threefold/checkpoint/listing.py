"""The work of `threefold checkpoint`: lists, describes, verifies and converts the checkpoints of a run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import DIVERGED, FOLDER, LOOP, folders
from threefold.checkpoint.manifest import MANIFEST, PARTIAL, Facts, Manifest, read_manifest
from threefold.checkpoint.save import WriterRecord, read_writer
from threefold.checkpoint.selection import inspect_checkpoint
from threefold.errors import UserError
from threefold.files import shown

_STEP = re.compile(r"step_(\d{8,})([.].*)?")
_DEPTH: Final = 3
"""Levels of folders below the one given, and above it, in which a run is searched for."""
_MOST: Final = 2000
"""Folders that are looked into at most."""


@dataclass(frozen=True)
class Named:
    """What a path names.

    Attributes:
        run: the run's folder.
        checkpoint: the folder of the checkpoint; None where the run is named.
    """

    run: Path
    checkpoint: Path | None = None


def locate(path: Path) -> Named:
    """The run, or the checkpoint, that a path names.

    Raises:
        UserError: it names neither; the sentence names the nearest folder that is one.
    """
    if path.is_dir() and (_STEP.fullmatch(path.resolve().name) or (path / MANIFEST).is_file()):
        found = path if _STEP.fullmatch(path.name) else path.resolve()  # such as `.`
        return Named(found.absolute().parent.parent, found)
    if checkpoint_folders(path):
        return Named(path)
    if path.name == FOLDER and checkpoint_folders(path.parent):
        return Named(path.parent)
    nearest = _nearest(path)
    if path.is_file():
        reason = "a file"
    elif not path.is_dir():
        reason = "not there"
    elif (path / FOLDER).is_dir():
        reason = f"a folder whose {FOLDER} are none so far"
    else:
        reason = f"no folder of a run: it has no {FOLDER}/step_…"
    advice = f"the nearest run is {shown(nearest)}" if nearest else "give the folder that a run has as --run-dir"
    raise UserError(f"{shown(path)} is {reason}; {advice}.")


def checkpoint_folders(run: Path) -> list[Path]:
    """All folders of a run that are or were to become a checkpoint, by step: complete or not, diverged or not."""
    parent = run / FOLDER
    if not parent.is_dir():
        return []
    try:
        complete = folders(run)  # one that was being replaced is among them where nothing else has its name
        found = [path for path in parent.iterdir() if is_checkpoint_name(path.name) or path in complete]
    except OSError as error:
        raise UserError(f"{shown(parent)} cannot be read ({error.strerror}); give a folder that can.") from None
    return sorted(found, key=lambda path: (step_of(path), path.name))


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder's name is that of a checkpoint in one of its states."""
    return bool(_STEP.fullmatch(name)) and name.partition(".")[2] in ("", PARTIAL[1:], DIVERGED[1:], f"old{PARTIAL}")


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; 0 where it has another."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else 0


def _nearest(path: Path) -> Path | None:
    """The nearest run: above the path, below it, or below what exists of it; of several that with the closest name."""
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
    """The runs below a folder, the least deep first."""
    level, found, seen = [folder], list[Path](), 0
    for _ in range(_DEPTH):
        inner: list[Path] = []
        for parent in level:
            try:
                children = sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith("."))
            except OSError:
                continue
            seen += len(children)
            found += [child for child in children if (child / FOLDER).is_dir() and checkpoint_folders(child)]
            inner += children
            if seen > _MOST:
                return found
        if found:
            return found
        level = inner
    return found


State = Literal["complete", "damaged", "partial", "diverged"]
"""complete: has all its files, as far as is seen without reading tensors; partial: it is being written, or its writing
was interrupted; diverged: set aside, as the loss after it was not finite."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint of a list.

    Attributes:
        path: its folder.
        step: in its name.
        state: as of `State`.
        reason: what is damaged, as a clause; empty for other states.
        bytes: of all its files.
        saved: when; of an older one, when its manifest was last changed; None where there is none.
        facts: None where they cannot be read.
        writer: which layout wrote it.
    """

    path: Path
    step: int
    state: State
    reason: str
    bytes: int
    saved: datetime | None
    facts: Facts | None
    writer: WriterRecord

    @property
    def layout(self) -> str:
        """Of its writer on one line; of an imported model that it is one."""
        if self.facts is not None and self.facts.step == 0 and not self.facts.documents and not self.writer.versions:
            return "imported"
        return str(self.writer)

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "path": str(self.path),
            "step": self.step,
            "state": self.state,
            "reason": self.reason,
            "bytes": self.bytes,
            "saved": self.saved.isoformat(timespec="seconds") if self.saved else None,
            "consumed_samples": self.facts.consumed_samples if self.facts else None,
            "layout": None if self.writer.layout is None else dict(self.writer.layout),
            "ranks": self.writer.ranks,
            "versions": dict(self.writer.versions),
            "weights_only": self.writer.weights_only,
        }


def list_checkpoints(run: Path) -> list[ListedCheckpoint]:
    """The checkpoints of a run by step, in whatever state.

    Raises:
        UserError: the folder cannot be read.
    """
    return [listed(path) for path in checkpoint_folders(run)]


def listed(path: Path) -> ListedCheckpoint:
    """A checkpoint with its state, all compared but the bytes of its tensors."""
    state: State = "complete"
    reason, facts = "", None
    try:
        manifest = read_manifest(path)
        facts = manifest.facts
        check(path, manifest)
        if path.name.endswith(DIVERGED):
            state = "diverged"
    except DamagedCheckpoint as damage:
        state, reason = "damaged", damage.reason
    except UserError as error:  # a later version of the format
        state, reason = "damaged", str(error).removesuffix(".")
    if path.name.endswith(PARTIAL):
        state, reason = "partial", ""
    writer = read_writer(path)
    return ListedCheckpoint(path, step_of(path), state, reason, size_of(path), saved_at(path, writer), facts, writer)


def saved_at(path: Path, writer: WriterRecord) -> datetime | None:
    """When a checkpoint was saved; of an older one when its manifest, or else its folder, was last changed."""
    return writer.saved or _changed(path / MANIFEST) or _changed(path)


def check(path: Path, manifest: Manifest) -> None:
    """Check all of a checkpoint but the bytes of its tensors, whoever wrote it.

    Raises:
        DamagedCheckpoint: it is not as it was written.
    """
    if LOOP not in manifest.files:
        inspect_checkpoint(path)
        return
    from threefold.checkpoint.storage import stored_index

    manifest.check_sizes()
    data = {chunk.file for tensor in stored_index(path).values() for chunk in tensor.chunks}
    for name in sorted(manifest.files.keys() - data):
        manifest.check_content(name)


def size_of(folder: Path) -> int:
    """Bytes of the files of a folder; those that vanish meanwhile count nothing."""
    return sum(_sizes(folder))


def _sizes(folder: Path) -> Iterator[int]:
    try:
        for path in folder.iterdir():
            yield path.stat().st_size
    except OSError:
        return


def _changed(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except (OSError, OverflowError, ValueError):
        return None

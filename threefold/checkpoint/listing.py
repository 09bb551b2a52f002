"""Lookup and listing of a run's checkpoints for `threefold checkpoint`."""

import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import DIVERGED, FOLDER, LOOP, folders
from threefold.checkpoint.manifest import MANIFEST, PARTIAL, Facts, Manifest, read_manifest
from threefold.checkpoint.selection import inspect_checkpoint
from threefold.checkpoint.writer import WriterRecord, read_writer
from threefold.errors import UserError
from threefold.files import shown

_STEP = re.compile(r"step_(\d{8,})([.].*)?")
_ANY = re.compile(rf"step_\d{{8,}}({'|'.join(map(re.escape, (PARTIAL, DIVERGED, f'.old{PARTIAL}')))})?")
_DEPTH: Final = 3
"""Levels of folders searched for a run, below the given folder and above it."""
_MOST: Final = 2000
"""Maximum number of folders searched."""


@dataclass(frozen=True)
class Named:
    """A run's folder, and the folder of a checkpoint unless a path names the run itself."""

    run: Path
    checkpoint: Path | None = None


def locate(path: Path) -> Named:
    """Return the run or checkpoint that a path names; raise UserError, with the nearest run, if it names neither."""
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
    """Return all checkpoint folders of a run by step, including incomplete and diverged ones."""
    parent = run / FOLDER
    if not parent.is_dir():
        return []
    try:
        complete = folders(run)  # includes a replaced checkpoint whose replacement never got its name
        found = [path for path in parent.iterdir() if _ANY.fullmatch(path.name) or path in complete]
    except OSError as error:
        raise UserError(f"{shown(parent)} cannot be read ({error.strerror}); give a folder that can.") from None
    return sorted(found, key=lambda path: (step_of(path), path.name))


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name, or 0 for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else 0


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
    """Return the runs below a folder, the shallowest first."""
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
"""State of a listed checkpoint.

complete: all files are present, as far as can be seen without reading tensors; partial: being written, or interrupted;
diverged: set aside because the loss after it was not finite.
"""


@dataclass(frozen=True)
class ListedCheckpoint:
    """An entry of a list of checkpoints.

    Attributes:
        reason: the damage, as a clause; empty in other states.
        bytes: total size of the files.
        saved: time of saving (for older checkpoints, of the manifest's last change); None if unknown.
        facts: facts in the manifest; None if unreadable.
        writer: record of the layout that wrote the checkpoint.
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
        """Layout of the writer on one line, or `imported` for an imported model."""
        if self.facts is not None and self.facts.step == 0 and not self.facts.documents and not self.writer.versions:
            return "imported"
        return str(self.writer)

    def document(self) -> dict[str, Any]:
        """Return the entry as a JSON object."""
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
    """Return the checkpoints of a run by step, in any state; raise UserError if the folder is unreadable."""
    return [listed(path) for path in checkpoint_folders(run)]


def listed(path: Path) -> ListedCheckpoint:
    """Return a checkpoint's list entry; everything but the bytes of its tensors is checked."""
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
    writer, size = read_writer(path), 0
    with suppress(OSError):  # the folder vanished
        for file in path.iterdir():
            with suppress(OSError):  # this file did
                size += file.stat().st_size
    return ListedCheckpoint(path, step_of(path), state, reason, size, saved_at(path, writer), facts, writer)


def saved_at(path: Path, writer: WriterRecord) -> datetime | None:
    """Return when a checkpoint was saved; for older ones, when its manifest or its folder last changed."""
    return writer.saved or _changed(path / MANIFEST) or _changed(path)


def check(path: Path, manifest: Manifest) -> None:
    """Check all of a run's or custom loop's checkpoint but tensor bytes; raise DamagedCheckpoint if it fails."""
    if LOOP not in manifest.files:
        inspect_checkpoint(path)
        return
    from threefold.checkpoint.index import read_index

    manifest.check_sizes()
    data = {chunk.file for tensor in read_index(path).values() for chunk in tensor.chunks}
    for name in sorted(manifest.files.keys() - data):
        manifest.check_content(name)


def _changed(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except (OSError, OverflowError, ValueError):
        return None

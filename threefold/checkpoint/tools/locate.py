"""What the path given to a command names: a run or one of its checkpoints; else the nearest folder that is one."""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from threefold.checkpoint.folder import DIVERGED, FOLDER, folders
from threefold.checkpoint.manifest import MANIFEST, PARTIAL
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

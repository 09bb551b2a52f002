"""Overwrite protection: markers of what this program wrote, so that nothing else is ever replaced."""

import json
import os
import stat
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final

from threefold.errors import UserError
from threefold.files import read_json, shown

MARKER: Final = ".threefold-output.json"
"""Name of the marker, a file that lists the files that were written to its folder."""
_FORMAT: Final = "threefold-output"
_LARGEST_MARKER: Final = 64 << 20

Listing = Callable[[Path], Collection[str] | None]
"""From a folder to the files in it that this program wrote, as paths relative to it; None if it wrote none there."""


def write_marker(folder: Path) -> None:
    """List all files of a folder in its marker."""
    names = sorted(_files(folder))
    (folder / MARKER).write_text(_marker(names), encoding="utf-8")


def list_marked(folder: Path) -> Collection[str] | None:
    """The files that a folder's marker lists, and the marker itself."""
    names = _read_marker(folder / MARKER)
    return None if names is None else {*names, MARKER}


def write_pair_marker(prefix: Path, files: Sequence[Path]) -> None:
    """List the files of one output in a folder that has others too, with their sizes."""
    sizes = {path.name: path.stat().st_size for path in files}
    marker_of(prefix).write_text(_marker(sizes), encoding="utf-8")


def marker_of(prefix: Path) -> Path:
    """The marker of an output that is files of one prefix."""
    return prefix.with_name(f".{prefix.name}{MARKER}")


def _marker(files: Collection[str]) -> str:
    return json.dumps({"format": _FORMAT, "version": 1, "files": files}, indent=1, ensure_ascii=False) + "\n"


def _read_marker(path: Path) -> Any:
    try:
        facts = read_json(path, limit=_LARGEST_MARKER)
    except UserError:
        return None
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT or facts.get("version") != 1:
        return None
    files = facts.get("files")
    if not isinstance(files, list | dict) or not all(isinstance(name, str) for name in files):
        return None
    return files


def check_replaceable(
    out: Path, inputs: Sequence[Path], overwrite: bool, place: str = "--out", listing: Listing = list_marked
) -> None:
    """Check that a folder may be made at `out`: there is nothing, an empty folder, or an output of this program.

    Raises:
        UserError: something else is there, or what is there is, contains or is in an input.
    """
    check_name(out, place)
    found = _status(out, place)
    if found is None:
        return
    if not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{place} {shown(out)} is {_kind(found, out)}; give the name of a folder to make")
    for path in inputs:
        if problem := _overlap(out, path):
            raise UserError(f"{place} {shown(out)} {problem}; choose a folder apart from what is read")
    entries = _listed(out, place)
    if not entries:
        return
    if not overwrite:
        raise UserError(f"{place} {shown(out)} exists already; choose another folder, or replace it with --overwrite")
    ours = listing(out)
    if ours is None:
        raise UserError(
            f"{place} {shown(out)} was not written by this program (it has {shown(entries[0])} and no list of files "
            "written), and --overwrite replaces nothing else; choose another folder"
        )
    if foreign := _foreign(out, set(ours)):
        raise UserError(
            f"{place} {shown(out)} has {shown(foreign)}, which this program did not write there, and --overwrite would "
            "delete it; move it away or choose another folder"
        )


def check_files_replaceable(prefix: Path, files: Sequence[Path], inputs: Sequence[Path], overwrite: bool) -> None:
    """Check that the files of one output can be made, in a folder that may have others.

    Raises:
        UserError: there is a file that is an input, or that this program did not write.
    """
    check_name(prefix, "--out")
    written = _read_marker(marker_of(prefix))
    for path in files:
        found = _status(path, "--out")
        if found is None:
            continue
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"--out {shown(path)} is {_kind(found, path)}; choose another prefix")
        if any(os.path.exists(other) and os.path.samefile(path, other) for other in inputs):
            raise UserError(f"--out {shown(path)} is what is read; choose another prefix")
        if not overwrite:
            raise UserError(
                f"--out {shown(path)} exists already; choose another prefix, or replace it with --overwrite"
            )
        if not isinstance(written, dict) or written.get(path.name) != found.st_size:
            raise UserError(
                f"--out {shown(path)} was not written by this program, and --overwrite replaces nothing else; choose "
                "another prefix"
            )


def check_name(out: Path, place: str) -> None:
    """Check that a path ends with a name, which can be given to something new.

    Raises:
        UserError: it does not, as `.`, `..` and `/`.
    """
    if out.name in ("", ".."):
        raise UserError(
            f"{place} {shown(out)} is a folder that other things are in; name one to make, such as "
            f"{shown(out / 'output')}"
        )


def _status(path: Path, place: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise UserError(f"{shown(path)} cannot be made (Not a directory); choose another {place}") from None
    except OSError as error:
        raise UserError(f"{place} {shown(path)} cannot be used ({error.strerror}); choose another") from None


def _kind(found: os.stat_result, path: Path) -> str:
    if stat.S_ISLNK(found.st_mode):
        return f"a symbolic link to {shown(os.readlink(path))}"
    if stat.S_ISREG(found.st_mode):
        return "a file"
    return "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, socket or device"


def _overlap(out: Path, source: Path) -> str:
    """How replacing `out` would touch an input; empty where it would not."""
    real, read = Path(os.path.realpath(out)), Path(os.path.realpath(source))
    if real == read:
        return "is what is read"
    if real in read.parents:
        return f"contains {shown(source)}, which is read"
    return f"is inside {shown(source)}, which is read" if read in real.parents else ""


def _listed(folder: Path, place: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise UserError(f"{place} {shown(folder)} cannot be read ({error.strerror}); choose another") from None


def _files(folder: Path) -> list[str]:
    """All that is in a folder and no folder, as paths relative to it."""
    found = []
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        found += [Path(parent, name).relative_to(folder).as_posix() for name in (*names, *links)]
    return found


def _foreign(folder: Path, ours: set[str]) -> str | None:
    """An entry of a folder that is not among `ours`, or is no longer what was written; None if there is none."""
    folders = {parent.as_posix() for name in ours for parent in Path(name).parents}
    for parent, inside, names in os.walk(folder):
        for name in sorted(inside):
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            if path.is_symlink() or relative not in folders:
                return relative
        for name in sorted(names):
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            if relative not in ours or path.is_symlink() or not path.is_file():
                return relative
    return None

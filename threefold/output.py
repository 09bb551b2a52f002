"""Atomic output: folders and sets of files appear complete or not at all, and replace only output of this program."""

import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

from threefold.errors import UserError
from threefold.files import shown
from threefold.foreign import FolderFiles, write_nofollow
from threefold.host import exchange_paths


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, text: str) -> None:
    """Write a text file and flush it to disk."""
    write_nofollow(path, text, durable=True)


MARKER: Final = ".threefold-output.json"
"""Name of the marker file, which lists the files that this program wrote to the folder."""
_FORMAT: Final = "threefold-output"

Listing = Callable[[Path], Collection[str] | None]
"""Function from a folder to the relative paths of the files that this program wrote there; None if it wrote none."""


def list_marked(folder: Path) -> Collection[str] | None:
    """Return the files listed in a folder's marker, and the marker itself; None without a valid marker."""
    names = _read_marker(folder / MARKER)
    return None if names is None else {*names, MARKER}


def marker_of(prefix: Path) -> Path:
    """Return the path of the marker of an output made of several files with one prefix."""
    return prefix.with_name(f".{prefix.name}{MARKER}")


def _write_marker(path: Path, files: Collection[str]) -> None:
    """Write a marker: the paths of a folder's files, or the names of files with one prefix and their sizes in bytes."""
    facts = {"format": _FORMAT, "version": 1, "files": files}
    write_nofollow(path, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")


def _read_marker(path: Path) -> Any:
    try:
        facts = FolderFiles(path.parent).json(path.name)
    except UserError:
        return None
    if not isinstance(facts, dict) or (facts.get("format"), facts.get("version")) != (_FORMAT, 1):
        return None
    files = facts.get("files")
    if not isinstance(files, list | dict) or not all(isinstance(name, str) for name in files):
        return None
    return files


def check_replaceable(
    out: Path, inputs: Sequence[Path], overwrite: bool, place: str = "--out", listing: Listing = list_marked
) -> None:
    """Raise a `UserError` unless `out` is apart from inputs and missing, empty or an earlier output of this program."""
    check_name(out, place)
    found = _status(out, place)
    if found is not None and not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{place} {shown(out)} is {_kind(found, out)}; give the name of a folder to make")
    for path in inputs:
        real, read = Path(os.path.realpath(out)), Path(os.path.realpath(path))
        if real == read or real in read.parents or read in real.parents:
            problem = "is an input" if real == read else f"is inside {shown(path)}, which is read"
            if real in read.parents:
                problem = f"contains {shown(path)}, which is read"
            raise UserError(f"{place} {shown(out)} {problem}; choose a folder apart from the inputs")
    if found is None:
        return
    try:
        entries = sorted(os.listdir(out))
    except OSError as error:
        raise UserError(f"{place} {shown(out)} cannot be read ({error.strerror}); choose another") from None
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
    """Raise a `UserError` if one of an output's files exists and is an input, or was not written by this program."""
    check_name(prefix, "--out")
    written = _read_marker(marker_of(prefix))
    for path in files:
        found = _status(path, "--out")
        if found is None:
            continue
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"--out {shown(path)} is {_kind(found, path)}; choose another prefix")
        if any(os.path.exists(other) and os.path.samefile(path, other) for other in inputs):
            raise UserError(f"--out {shown(path)} is an input; choose another prefix")
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
    """Raise UserError if a path has no name of its own to give to something new, such as `.`, `..` or `/`."""
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


def _foreign(folder: Path, ours: set[str]) -> str | None:
    """Return an entry of a folder that is not listed in `ours` or changed its kind since; None if there is none."""
    folders = {parent.as_posix() for name in ours for parent in Path(name).parents}
    for parent, inside, names in os.walk(folder):
        for name in (*sorted(inside), *sorted(names)):
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            known = relative in folders if name in inside else relative in ours and path.is_file()
            if path.is_symlink() or not known:
                return relative
    return None


STAGING, NEW, OLD, COMMIT = "threefold-staging", "new", "old", "commit"
"""Entries of a staging folder: its mark, the folders of the new and the old output, and the mark of complete files."""


@contextmanager
def staged_directory(
    final: Path,
    *,
    inputs: Sequence[Path] = (),
    overwrite: bool = True,
    place: str = "--out",
    listing: Listing = list_marked,
    marked: bool = True,
) -> Iterator[Path]:
    """Write a folder next to `final` and rename it to `final` once it is complete and flushed to disk.

    Yields the folder to write into. If the body raises, that folder is removed and `final` is unchanged. If the process
    is killed, `final` is either unchanged or complete, and the next call cleans up. An existing folder at `final` is
    replaced at the end. A `UserError` is raised if another process is writing the same folder, it cannot be written, or
    the existing entry may not be replaced.

    Args:
        inputs: files and folders that are read and must not be replaced.
        overwrite: whether an existing folder of this program may be replaced.
        place: option or setting that chose the path, for error messages.
        listing: function that lists the files of a folder that this program wrote.
        marked: whether to write the marker that `list_marked` reads.
    """

    def check() -> None:
        check_replaceable(final, inputs, overwrite, place, listing)

    with _staging(final, place, check) as staging:
        yield staging / NEW
        if marked:
            new = staging / NEW
            paths = (path for path in new.rglob("*") if path.is_symlink() or not path.is_dir())
            _write_marker(new / MARKER, sorted(path.relative_to(new).as_posix() for path in paths))
        _sync_tree(staging)
        check()  # again, as writing may have taken hours
        if not os.path.lexists(final):
            (staging / NEW).rename(final)
        elif not exchange_paths(staging / NEW, final):
            final.rename(staging / OLD)
            try:
                (staging / NEW).rename(final)
            except BaseException:
                (staging / OLD).rename(final)
                raise
        sync(final.parent)


@contextmanager
def staged_files(prefix: Path, names: Sequence[str], *, inputs: Sequence[Path], overwrite: bool) -> Iterator[Path]:
    """Write files to a folder next to `prefix`, and move them into place once all are complete and flushed to disk.

    Yields the folder to write into; see `staged_directory`. `prefix` is common to the files' paths, and their marker is
    named after it.
    """

    def check() -> None:
        check_files_replaceable(prefix, [prefix.with_name(name) for name in names], inputs, overwrite)

    with _staging(prefix, "--out", check) as staging:
        yield staging / NEW
        sizes = {name: (staging / NEW / name).stat().st_size for name in names}
        _write_marker(marker_of(staging / NEW / prefix.name), sizes)
        _sync_tree(staging)
        check()
        (staging / COMMIT).touch()
        sync(staging)
        _move_files(staging, prefix.parent)


@contextmanager
def _staging(final: Path, place: str, check: Callable[[], None]) -> Iterator[Path]:
    """Yield a new staging folder for `final` that only this process writes to; remove it at the end."""
    check()
    with ExitStack() as stack:
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(final, place))
            _recover(final)
            check()
            staging = _beside(final, secrets.token_hex(8))
            try:
                staging.mkdir()
                (staging / STAGING).touch()
                (staging / NEW).mkdir()
            except BaseException:
                _remove(staging)
                raise
        except OSError as error:
            raise UserError(f"{shown(final)} cannot be made ({error.strerror}); choose another {place}") from None
        try:
            yield staging
        except OSError as error:
            raise UserError(
                f"{shown(final)} could not be written ({error.strerror or error}); make room or choose another {place}"
            ) from error
        finally:
            if os.path.lexists(final) or not (staging / OLD).is_dir():
                _remove(staging)


def _beside(final: Path, ending: str) -> Path:
    name = os.fsencode(final.name)[:120].decode("utf-8", errors="ignore")
    return final.with_name(f".{name}.threefold-{ending}")


@contextmanager
def _locked(final: Path, place: str) -> Iterator[None]:
    """Hold the lock of an output's lock file. It ends with its process: a lock file that can be locked is stale."""
    path, held = _beside(final, "lock"), False
    while not held:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        found = os.fstat(lock)
        if not stat.S_ISREG(found.st_mode) or found.st_size:
            os.close(lock)
            raise UserError(f"{shown(path)} is in the way and not this program's; move it or choose another {place}")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UserError(
                f"another process is writing {shown(final)}; wait for it or choose another {place}"
            ) from None
        with suppress(FileNotFoundError):
            held = os.path.samestat(found, os.stat(path))
        if not held:
            os.close(lock)  # the previous holder has removed it meanwhile
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(lock)


def _recover(final: Path) -> None:
    """Complete or remove what killed writers of `final` left behind. The caller holds the lock."""
    pattern = re.compile(re.escape(_beside(final, "").name) + "[0-9a-f]{16}")
    for entry in sorted(final.parent.iterdir()):
        if not pattern.fullmatch(entry.name) or entry.is_symlink() or not entry.is_dir():
            continue
        if not (entry / STAGING).is_file():
            with suppress(OSError):
                entry.rmdir()  # killed before it marked its folder as its own
            continue
        new, old = (entry / NEW).is_dir(), (entry / OLD).is_dir()
        if (entry / COMMIT).is_file():
            _move_files(entry, final.parent)
        elif old and not os.path.lexists(final):
            # Killed between the two renames: the old folder is moved away only once the new one is complete.
            (entry / (NEW if new else OLD)).rename(final)
        elif old and new:
            continue  # something else has taken the name since: keep both
        _remove(entry)


def _move_files(staging: Path, folder: Path) -> None:
    for path in sorted((staging / NEW).iterdir()):
        path.replace(folder / path.name)
    sync(folder)


def _remove(staging: Path) -> None:
    with suppress(OSError):  # the file that marks the folder as ours goes last
        (staging / COMMIT).unlink(missing_ok=True)
        for folder in (NEW, OLD):
            shutil.rmtree(staging / folder, ignore_errors=True)
        (staging / STAGING).unlink(missing_ok=True)
        staging.rmdir()


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in (*names, "."):
            sync(Path(parent, name))


class Progress(Protocol):
    """Callbacks that receive the progress of reading, in order to display it."""

    def phase(self, name: str, total_bytes: int) -> None:
        """Begin a new phase, which reads `total_bytes` of input."""

    def advance(self, read_bytes: int) -> None:
        """Record that `read_bytes` more bytes have been read."""


class _Silent:
    def phase(self, name: str, total_bytes: int) -> None:
        pass

    def advance(self, read_bytes: int) -> None:
        pass


SILENT: Final[Progress] = _Silent()

"""Atomic output: a folder that appears complete or not at all, and overwrites nothing that this program did not write.

While `NAME` is made, there are two entries beside it: `.NAME.threefold-lock`, locked by the process that writes, and
`.NAME.threefold-` with 16 hexadecimal digits, a folder with the file `STAGING` and the new content under `NEW`. The
commit exchanges `NEW` and `NAME` in one step where the file system can do that; where it cannot, `NAME` is moved to
`OLD` in the same folder first. A process that is killed thus leaves the old output or the new one, and what else it
left is completed or removed by the next call.

Files of one prefix in a folder with others are made in the same way; once `COMMIT` is in the staging folder they are
complete, and those not yet in their place are moved there, by the next call if need be.
"""

import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from threefold.errors import UserError
from threefold.files import shown
from threefold.host import exchange_paths
from threefold.output.durable import sync
from threefold.output.overwrite import (
    Listing,
    check_files_replaceable,
    check_replaceable,
    list_marked,
    write_marker,
    write_pair_marker,
)

STAGING: Final = "threefold-staging"
NEW: Final = "new"
OLD: Final = "old"
COMMIT: Final = "commit"
_LONGEST: Final = 120
"""Bytes of an output's name that the names of the entries beside it repeat."""


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
    """Write a folder beside `final` and give it that name once it is complete and on the disk.

    Yields the folder to write into. If the body raises, that folder is removed and `final` is as it was; if the process
    is killed, `final` is as it was or new, and the next call removes what was left. A folder at `final` is
    replaced at the end.

    Args:
        final: the folder.
        inputs: files and folders that are read, of which nothing is replaced.
        overwrite: whether a folder of this program's may be replaced.
        place: the option or setting that chose it.
        listing: says which files of a folder this program wrote.
        marked: whether the folder gets the marker that `list_marked` reads.

    Raises:
        UserError: another process is writing the same folder, it cannot be written, or what is there may not be
            replaced.
    """

    def check() -> None:
        check_replaceable(final, inputs, overwrite, place, listing)

    with _staging(final, place, check) as staging:
        yield staging / NEW
        if marked:
            write_marker(staging / NEW)
        _sync_tree(staging)
        check()  # hours may have passed since the first look
        _commit(staging, final)


@contextmanager
def staged_files(prefix: Path, names: Sequence[str], *, inputs: Sequence[Path], overwrite: bool) -> Iterator[Path]:
    """Write files into a folder beside `prefix`, whence they are moved beside it once all are complete and on the disk.

    Yields the folder to write into. What happens to it is as of `staged_directory`.

    Args:
        prefix: what the files' names begin with; their marker is named after it.
        names: of the files.
        inputs: files that are read, none of which is replaced.
        overwrite: whether files of this program's may be replaced.

    Raises:
        UserError: as `staged_directory`.
    """

    def check() -> None:
        check_files_replaceable(prefix, [prefix.with_name(name) for name in names], inputs, overwrite)

    with _staging(prefix, "--out", check) as staging:
        yield staging / NEW
        write_pair_marker(staging / NEW / prefix.name, [staging / NEW / name for name in names])
        _sync_tree(staging)
        check()
        (staging / COMMIT).touch()
        sync(staging)
        _move_files(staging, prefix.parent)


@contextmanager
def _staging(final: Path, place: str, check: Callable[[], None]) -> Iterator[Path]:
    """A new staging folder for `final`, whose only writer this process is; removed at the end."""
    check()
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(final, place)
    except OSError as error:
        raise UserError(f"{shown(final)} cannot be made ({error.strerror}); choose another {place}") from None
    try:
        try:
            _recover(final)
            check()
            staging = _stage(final)
        except OSError as error:
            raise UserError(f"{shown(final)} cannot be made ({error.strerror}); choose another {place}") from None
        try:
            yield staging
        except OSError as error:
            raise UserError(
                f"{shown(final)} could not be written ({error.strerror or error}); make room or choose another {place}"
            ) from error
        finally:
            _remove(staging, keep=(staging / OLD).is_dir() and not os.path.lexists(final))
    finally:
        _unlock(final, lock)


def _beside(final: Path, ending: str) -> Path:
    name = os.fsencode(final.name)[:_LONGEST].decode("utf-8", errors="ignore")
    return final.with_name(f".{name}.threefold-{ending}")


def _lock(final: Path, place: str) -> int:
    """The open lock file of an output: the lock goes with its process, so a file that can be locked is a leftover."""
    path = _beside(final, "lock")
    while True:
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
            if os.path.samestat(found, os.stat(path)):
                return lock
        os.close(lock)  # its holder removed it in between


def _unlock(final: Path, lock: int) -> None:
    with suppress(OSError):
        _beside(final, "lock").unlink(missing_ok=True)
    os.close(lock)


def _stage(final: Path) -> Path:
    staging = _beside(final, secrets.token_hex(8))
    try:
        staging.mkdir()
        (staging / STAGING).touch()
        (staging / NEW).mkdir()
    except BaseException:
        _remove(staging)
        raise
    return staging


def _recover(final: Path) -> None:
    """Complete or remove what killed writers of `final` left; no process writes now, as the lock is held."""
    pattern = re.compile(re.escape(_beside(final, "").name) + "[0-9a-f]{16}")
    for entry in sorted(final.parent.iterdir()):
        if not pattern.fullmatch(entry.name) or entry.is_symlink() or not entry.is_dir():
            continue
        if not (entry / STAGING).is_file():
            with suppress(OSError):
                entry.rmdir()  # killed before it marked its folder, which is then empty
            continue
        new, old = (entry / NEW).is_dir(), (entry / OLD).is_dir()
        if (entry / COMMIT).is_file():
            _move_files(entry, final.parent)
        elif old and not os.path.lexists(final):
            # Killed between the two moves: a folder is moved away only for a new one that is whole.
            (entry / (NEW if new else OLD)).rename(final)
        elif old and new:
            continue  # something else took the name since, so both are kept
        _remove(entry)


def _move_files(staging: Path, folder: Path) -> None:
    for path in sorted((staging / NEW).iterdir()):
        path.replace(folder / path.name)
    sync(folder)


def _commit(staging: Path, final: Path) -> None:
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


def _remove(staging: Path, keep: bool = False) -> None:
    """Delete a staging folder, the mark that makes it ours last."""
    if keep:
        return
    with suppress(OSError):
        (staging / COMMIT).unlink(missing_ok=True)
        for folder in (NEW, OLD):
            shutil.rmtree(staging / folder, ignore_errors=True)
        (staging / STAGING).unlink(missing_ok=True)
        staging.rmdir()


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))

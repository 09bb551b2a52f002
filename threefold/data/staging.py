"""A folder that appears whole or not at all."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from threefold.errors import UserError

LOCK: Final = "writing.lock"


@contextmanager
def staged_directory(final: Path, place: str = "--out") -> Iterator[Path]:
    """Write a folder beside `final` and give it that name once it is complete and on the disk.

    Yields the folder to write into, `final` with ".partial" added. If the body raises, that folder is removed and
    `final` is as it was; if the process is killed, `final` is as it was and the next call removes what was left. A
    folder that stood at `final` is replaced at the end.

    Args:
        final: the folder.
        place: the option or setting that chose it.

    Raises:
        UserError: another process is writing the same folder, or it cannot be written.
    """
    partial = final.with_name(final.name + ".partial")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(exist_ok=True)
        lock = os.open(partial / LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise UserError(f"{partial} cannot be made ({error.strerror}); choose another {place}") from None
    try:
        _claim(lock, partial)
        try:
            yield partial
            _commit(partial, final)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"{final} could not be written ({error.strerror or error}); make room or choose another {place}"
            ) from error
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _claim(lock: int, partial: Path) -> None:
    try:
        # The lock goes with its process, so one that can be taken marks a folder whose writer was killed.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"another process is writing {partial}; wait for it or choose another --out") from None
    for leftover in partial.iterdir():
        if leftover.is_dir():
            shutil.rmtree(leftover)
        elif leftover.name != LOCK:
            leftover.unlink()


def _commit(partial: Path, final: Path) -> None:
    (partial / LOCK).unlink()
    for path in partial.iterdir():
        sync(path)
    sync(partial)
    replaced = final.with_name(final.name + ".replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    try:
        partial.rename(final)
    except BaseException:
        with suppress(FileNotFoundError):
            replaced.rename(final)
        raise
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def sync(path: Path) -> None:
    """Put a file's content, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Scratch folders that no killed process leaves behind for long."""

import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def host_name() -> tuple[str, str]:
    """Return an identifier of this host that is unique even if hosts share a file system or a name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return platform.node(), boot.read_text() if boot.exists() else ""


@contextmanager
def scratch_folder(parent: str | Path) -> Iterator[Path]:
    """Make a folder of this user alone in `parent`, and delete it at the end; raises OSError if there can be none.

    This process holds a lock on it, which the system frees when the process ends, however it ends. The next call for
    `parent` on this host therefore deletes the folders of killed processes, and never that of a living one, which may
    run in another container that shares `parent`.
    """
    begin = f"threefold-{hashlib.sha256((host_name()[1] or host_name()[0]).encode()).hexdigest()[:8]}-"
    _delete_abandoned(Path(parent), begin)
    folder, lock = _make_locked(Path(parent), begin)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


_UNLOCKED = "new-"
"""Begins the rest of the name of a folder that has no lock yet, and is empty."""


def _make_locked(parent: Path, begin: str) -> tuple[Path, int]:
    for last in (False, False, True):
        fresh = Path(tempfile.mkdtemp(prefix=f"{begin}{_UNLOCKED}", dir=parent))
        folder, lock = parent / f"{begin}{fresh.name.removeprefix(begin + _UNLOCKED)}", -1
        try:
            lock = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            with suppress(OSError):  # a file system without locks, on which nobody takes one
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fresh.rename(folder)
            return folder, lock
        except OSError as error:
            if lock >= 0:
                os.close(lock)
            with suppress(OSError):
                fresh.rmdir()
            if last or not isinstance(error, FileNotFoundError):  # another process took it for an abandoned one
                raise
    raise AssertionError


def _delete_abandoned(parent: Path, begin: str) -> None:
    with suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith(f"{begin}{_UNLOCKED}"):
                with suppress(OSError):
                    (parent / name).rmdir()  # no other than an empty one
            elif name.startswith(begin):
                _delete_if_abandoned(parent / name)


def _delete_if_abandoned(folder: Path) -> None:
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if its process lives
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)

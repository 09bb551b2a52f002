"""Lock RUN/run.lock, so that one run at a time uses a run folder.

The lock is `flock`, which ends with the process that holds it. The file stays and names the holder.
"""

import errno
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple, Self

from filelock import FileLock, Timeout

from threefold.errors import UserError
from threefold.files import require_local, shown
from threefold.foreign import FolderFiles, own_file, write_own

LOCK_FILE: Final = "run.lock"
LONGEST_WAIT: Final = 15.0
"""Seconds to wait for a holder that is not a live process of this host: it may be ending, or on another host."""


class Holder(NamedTuple):
    """Process that holds a lock, and the date and time at which it took it."""

    host: str
    pid: int
    since: str

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read the holder that a lock file names; None if it names none (yet)."""
        try:
            values = FolderFiles(path.parent).json(path.name)
            return cls(str(values["host"]), int(values["pid"]), str(values["since"]))
        except (UserError, TypeError, KeyError, ValueError):
            return None

    def is_alive_here(self) -> bool:
        if self.host != socket.gethostname():
            return False
        with suppress(PermissionError):
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return False
        return True

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, since {self.since}"


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run folder within the block; create the folder if it is missing.

    Waits at most `LONGEST_WAIT` seconds for a holder that is not a live process of this host, as the ranks of a killed
    run may take a moment to end. Raises a UserError if another process holds the lock. If the file system has no locks,
    prints a warning and locks nothing.
    """
    path = run_dir / LOCK_FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():  # not removed, as another process may be about to make the file
            raise UserError(f"{shown(path)} is a link, and the lock of a run is a file of its own; remove the link.")
        lock = FileLock(own_file(path), timeout=0, fallback_to_soft=False)
        locked = _acquire(lock, run_dir)
        if locked:
            holder = Holder(socket.gethostname(), os.getpid(), f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}")
            write_own(path, json.dumps(holder._asdict()) + "\n")
    except OSError as error:
        raise cannot_write(run_dir, error) from error
    try:
        yield
    finally:
        if locked:
            with suppress(OSError):  # the folder may be gone
                os.truncate(path, 0)
            lock.release()


def require_free(run_dir: Path) -> None:
    """Raise `UserError` if a live process of this host holds the lock; an early check, as `run_lock` decides."""
    holder = Holder.read(run_dir / LOCK_FILE)
    if holder is None or not holder.is_alive_here():
        return
    lock = FileLock(run_dir / LOCK_FILE, timeout=0, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise _in_use(run_dir, holder) from None
    except (OSError, NotImplementedError):
        return
    lock.release()


def require_folder(run_dir: Path) -> None:
    """Check that `run_dir` is a folder or can be created."""
    require_local(run_dir, "--run-dir")
    name = f"--run-dir is {shown(run_dir)}"
    try:
        os.fspath(run_dir).encode()
        found = os.stat(run_dir)
    except (FileNotFoundError, NotADirectoryError) as error:  # the latter is reported when the folder is created
        if isinstance(error, FileNotFoundError) and run_dir.is_symlink():
            raise UserError(f"{name}, a link to something that does not exist; name a folder.") from None
        return
    except OSError as error:
        raise UserError(f"{name}, which cannot be a folder: {error.strerror}.") from None
    except UnicodeEncodeError:
        raise UserError(
            f"{name}, whose bytes are not UTF-8, in which the run's log names its folder; choose another name."
        ) from None
    except ValueError:
        raise UserError(f"{name}, which holds a NUL character; name a folder.") from None
    if not stat.S_ISDIR(found.st_mode):
        kind = "a file" if stat.S_ISREG(found.st_mode) else "a pipe, socket or device"
        raise UserError(f"{name}, which is {kind}; name a folder.")


def cannot_write(run_dir: Path, error: OSError) -> UserError:
    """Return the error for a file in the run folder that cannot be written."""
    return UserError(f"Cannot write to --run-dir {shown(run_dir)}: {error.strerror}.")


def _in_use(run_dir: Path, holder: Holder | None) -> UserError:
    return UserError(
        f"{shown(run_dir)} is in use by another run ({holder or 'an unknown process'}); wait for that one, "
        "end it, or choose another --run-dir."
    )


def _acquire(lock: FileLock, run_dir: Path) -> bool:
    """Take the lock; return False if the file system has no locks."""
    deadline = time.monotonic() + LONGEST_WAIT
    while True:
        try:
            lock.acquire()
            return True
        except Timeout:
            holder = Holder.read(run_dir / LOCK_FILE)
            if (holder and holder.is_alive_here()) or time.monotonic() > deadline:
                raise _in_use(run_dir, holder) from None
            time.sleep(0.1)
        except (OSError, NotImplementedError) as error:
            unsupported = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
            if isinstance(error, OSError) and error.errno not in unsupported:
                raise
            warning = f"the file system of {shown(run_dir)} has no locks, so nothing keeps a second run out of it"
            print(f"Warning: {warning}.", file=sys.stderr, flush=True)
            return False

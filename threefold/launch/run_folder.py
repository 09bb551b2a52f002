"""The folder of a run: checks before its start, its lock and config, and where to go on after a stop.

The lock of RUN/run.lock is `flock`, which ends with the process that holds it. The file stays and names the holder.
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
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple, Self

from filelock import FileLock, Timeout

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import FOLDER, newest, remains, require_outside_checkpoints
from threefold.checkpoint.manifest import MANIFEST, PARTIAL, read_manifest
from threefold.checkpoint.resume import copies_of
from threefold.config import Config
from threefold.doors import added
from threefold.errors import UserError
from threefold.files import require_local, shown
from threefold.foreign import FolderFiles, nofollow_file, write_nofollow
from threefold.launch.output import log_file
from threefold.launch.process import signal_name
from threefold.output import write_durably

LOCK_FILE: Final = "run.lock"
CONFIG_FILE: Final = "config.yaml"
LOCK_PATIENCE: Final = 15.0
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

    Waits at most `LOCK_PATIENCE` seconds for a holder that is not a live process of this host, as the ranks of a killed
    run may take a moment to end. Raises a UserError if another process holds the lock. If the file system has no locks,
    prints a warning and locks nothing.
    """
    path = run_dir / LOCK_FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():  # not removed, as another process may be about to make the file
            raise UserError(f"{shown(path)} is a link, and the lock of a run is a file of its own; remove the link.")
        lock = FileLock(nofollow_file(path), timeout=0, fallback_to_soft=False)
        locked = _acquire(lock, run_dir)
        if locked:
            holder = Holder(socket.gethostname(), os.getpid(), f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %Z}")
            write_nofollow(path, json.dumps(holder._asdict()) + "\n")
    except OSError as error:
        raise cannot_write(run_dir, error) from error
    try:
        yield
    finally:
        if locked:
            with suppress(OSError):  # the folder may be gone
                os.truncate(path, 0)
            lock.release()


@contextmanager
def locked_folder(run_dir: Path, config: Config, is_new: bool) -> Iterator[None]:
    """Hold the lock of a run's folder within the block, with the config written into it."""
    with run_lock(run_dir):
        if is_new:
            require_no_checkpoints(run_dir)  # left by a run that ended since the first check
        try:
            fresh = run_dir / (CONFIG_FILE + ".tmp")  # on a full disk the existing file stays
            write_durably(fresh, config.to_yaml_as_given())
            fresh.replace(run_dir / CONFIG_FILE)
        except OSError as error:
            raise cannot_write(run_dir, error) from error
        yield


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


def require_place(run_dir: Path) -> None:
    """Check that a run may put its folder and its checkpoints there."""
    require_folder(run_dir)
    require_outside_checkpoints(run_dir, "--run-dir")
    folder = run_dir / FOLDER
    if os.path.lexists(folder) and not folder.is_dir():
        what = "a link to something that is not a folder" if folder.is_symlink() else "not a folder"
        raise UserError(
            f"{shown(folder)} is {what}, and the run's checkpoints go there; move it, or choose another --run-dir."
        )
    there = Path(os.path.realpath(folder))
    if folder.is_symlink() and there.name == FOLDER and FolderFiles(there.parent).holds(LOCK_FILE):
        raise UserError(
            f"{shown(folder)} is a link to the checkpoints of another run, {shown(there.parent)}, which this one would "
            "delete; remove the link, or choose another --run-dir."
        )
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(
            f"{shown(folder)} cannot be written, and the run's checkpoints go there; make it writable, or choose "
            "another --run-dir."
        )


def require_writable(run_dir: Path) -> None:
    """Check that a run can make its folder, or write to it, by making a folder there for a moment."""
    there = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if os.path.lexists(path))
    try:
        TemporaryDirectory(prefix=".threefold-", dir=there).cleanup()
    except OSError as error:
        raise cannot_write(run_dir, error) from None


def require_no_foreign(run_dir: Path, config: Config) -> None:
    """Check that a folder unused by any run has no files that the run would overwrite."""
    from threefold.train.callbacks.registry import files_of
    from threefold.train.callbacks.step_log import LOG_FILE

    replaced = [CONFIG_FILE, *added("RUN_FILES").values(), LOG_FILE, *files_of(config.train.callbacks or ())]
    if (copies := copies_of(config, run_dir)) is not None:
        replaced += copies.new_files()
    found = [name for name in replaced if os.path.lexists(run_dir / name)]
    if found and not _is_used(run_dir):
        raise UserError(
            f"--run-dir is {shown(run_dir)}, which no run has used and whose {found[0]} the run would replace; choose "
            f"another, such as {shown(run_dir / 'run')}."
        )


def _is_used(run_dir: Path) -> bool:
    files = (run_dir / LOCK_FILE, log_file(run_dir, 0), *(path / MANIFEST for path in remains(run_dir)))
    return any(map(os.path.lexists, files))


def require_no_checkpoints(run_dir: Path) -> None:
    """Check that a new run finds nothing named like a checkpoint, whatever program wrote it.

    Incomplete checkpoints of an interrupted run do not count.
    """
    if newest(run_dir):
        raise UserError(f"{run_dir} already has checkpoints; resume with --resume, or choose another --run-dir.")
    used = _is_used(run_dir)
    named = sorted((run_dir / FOLDER).glob("step_*"))
    if found := [path for path in named if not (used and path.name.endswith(PARTIAL))]:
        try:
            read_manifest(found[-1]).check_sizes()
            what = "is there"
        except DamagedCheckpoint as damage:
            what = f"is not a complete checkpoint ({damage.reason})"
        raise UserError(
            f"{shown(found[-1])} {what}, and a run that begins anew would write over it or beside it; choose another "
            "--run-dir, restore it and resume with --resume, or move it away."
        )


def explain_stop(run_dir: Path, signal: int | str, step: int | None, command: str, resumed: str | None = None) -> str:
    """Return the message about a run that a signal or its time limit ended, with the command that resumes it.

    Args:
        signal: signal number, or the time limit as text (`Stopped.limit`).
        step: number of updates made; None if a second signal ended the run without a checkpoint.
        resumed: command that resumes it; None for `command`, which started the run, with `--resume`.
    """
    saved = newest(run_dir)
    by = signal if isinstance(signal, str) else signal_name(signal)
    resumed = resumed or (command if "--resume" in command else f"{command} --resume")
    if step is None:
        where = f"the newest checkpoint is {saved.path}" if saved else "there is no checkpoint"
        begin = f"Ended at once by a second {by}, without saving; {where}"
    elif saved is None:
        begin = f"Stopped by {by} before the first step, with nothing to save"
    elif saved.step == step:
        begin = f"Stopped by {by} after step {step:,}, which is saved in {saved.path}"
    else:
        begin = f"Stopped by {by} after step {step:,}; the newest checkpoint is {saved.path}"
    return f"{begin}; resume with:\n  {resumed}" if saved else f"{begin}; start again with:\n  {command}"


def explain_early_stop(run_dir: Path, step: int, reason: str) -> str:
    """Return the message about a run that a callback ended for `reason` after `step` updates."""
    saved = newest(run_dir)
    where = f", which is saved in {saved.path}" if saved and saved.step == step else ""
    return f"Stopped by a callback after step {step:,}{where}: {reason}."


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
    deadline = time.monotonic() + LOCK_PATIENCE
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

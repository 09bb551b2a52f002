"""Text encoded once: folders that appear whole, are named by what they were made from, and have one writer."""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from threefold.data.staging import LOCK, staged_directory
from threefold.errors import UserError

FACTS: Final = "meta.json"
"""Written last; has the size of every other file of the folder."""
_SETTLED: Final = 2.0
"""Seconds after which a change of a file shows in its time stamp on any file system."""


def entry_name(facts: dict[str, Any]) -> str:
    """The folder's name for content that follows from `facts` alone (plain JSON values)."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def cached(roots: list[Path], name: str, write: Callable[[Path], None]) -> Path:
    """The whole folder `name` in one of `roots`, made by `write` if there is none.

    Of several processes that ask for it at once one writes and the others wait. If it is killed, what it had written
    counts for nothing and the next one begins anew.

    Args:
        roots: where to look; the first that can be written to gets a new folder.
        name: of the folder.
        write: fills the folder that it is given.

    Raises:
        UserError: no root can be written to, or the disk is full.
    """
    for root in roots:
        if _is_whole(root / name):
            return root / name
    refusals = []
    for root in roots:
        try:
            with _only_writer(root, name):
                if not _is_whole(root / name):
                    _write(root / name, write)
                return root / name
        except _CannotWrite as error:
            refusals.append(f"{root} ({error})")
    raise UserError(f"no cache can be written in {' or '.join(refusals)}; set data.cache to a folder that can.")


class _CannotWrite(Exception):
    pass


@contextmanager
def _only_writer(root: Path, name: str) -> Iterator[None]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(root / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _CannotWrite(error.strerror) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # goes with its process, however that ends
        except OSError as error:
            raise _CannotWrite(error.strerror) from None
        yield
    finally:
        os.close(lock)


def _write(folder: Path, write: Callable[[Path], None]) -> None:
    with staged_directory(folder, place="data.cache") as partial:
        write(partial)
        files = {path.name: path.stat().st_size for path in partial.iterdir() if path.name != LOCK}
        (partial / FACTS).write_text(json.dumps({"files": files}) + "\n", encoding="utf-8")


def _is_whole(folder: Path) -> bool:
    try:
        files = json.loads((folder / FACTS).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def content_hash(path: Path, roots: list[Path]) -> str:
    """SHA-256 of a file, which is read only if it may have changed since it was hashed last.

    Args:
        path: the file.
        roots: folders where the hash is looked for; the first that can be written to keeps it.

    Raises:
        UserError: the file cannot be read.
    """
    stamp = f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.hash"
    try:
        state = path.stat()
        now = [state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns]
        for root in roots:
            with suppress(OSError, ValueError, KeyError, TypeError):
                known = json.loads((root / stamp).read_text(encoding="utf-8"))
                if known["state"] == now:
                    return str(known["sha256"])
        started = time.time()
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    if started - state.st_mtime > _SETTLED:
        _keep_hash(roots, stamp, {"state": now, "sha256": sha256})
    return sha256


def _keep_hash(roots: list[Path], stamp: str, known: dict[str, Any]) -> None:
    for root in roots:
        with suppress(OSError):
            root.mkdir(parents=True, exist_ok=True)
            fresh = root / f"{stamp}.{os.getpid()}"
            fresh.write_text(json.dumps(known), encoding="utf-8")
            fresh.replace(root / stamp)
            return

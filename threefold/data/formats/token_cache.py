"""The cache of encoded JSON lines: entries are named by a hash of their inputs, written atomically, by one process."""

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from platformdirs import user_cache_path

from threefold.checksums import checksum, checksums, seal, unseal
from threefold.data.stored_array import TOKENS_FILE
from threefold.errors import UserError
from threefold.files import read_json, require_file
from threefold.output import staged_directory

CACHE_ENDING: Final = ".cache"
"""What is added to the name of a file for the folder with its cache."""
FACTS: Final = "meta.json"
"""Written last; has the size and the checksum of every other file of the folder, and one of itself."""
_SMALL: Final = 1 << 30
"""Bytes of the largest file that is checked each time it is opened."""
_SETTLED: Final = 2.0
"""Seconds after which a change of a file shows in its time stamp on any file system."""


def default_roots(path: Path) -> list[Path]:
    """Where the cache of a file is looked for, and written to the first that can be: beside it, else the user's cache.

    The last is where earlier versions put the latter, also where XDG_CACHE_HOME names another folder.
    """
    beside = path.with_name(path.name + CACHE_ENDING)
    roots = [beside, user_cache_path("threefold", appauthor=False), Path.home() / ".cache" / "threefold"]
    return list(dict.fromkeys(roots))


def entry_name(facts: dict[str, Any]) -> str:
    """The folder's name for content that follows from `facts` alone (plain JSON values)."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def cached(roots: list[Path], name: str, write: Callable[[Path], None]) -> Path:
    """The whole folder `name` in one of `roots`, made by `write` if there is none.

    Of several processes that need it at once one writes and the others wait. If it is killed, what it had written
    is discarded and the next one starts again.

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
    # A folder of that name, damaged or not, is an entry of the cache.
    with staged_directory(folder, place="data.cache", listing=_all_files, marked=False) as partial:
        write(partial)
        paths = sorted(partial.iterdir())
        facts = {
            "files": {path.name: path.stat().st_size for path in paths},
            "checksums": dict(zip((path.name for path in paths), checksums(paths), strict=True)),
        }
        (partial / FACTS).write_text(json.dumps(seal(facts)) + "\n", encoding="utf-8")


def entry_checksums(folder: Path) -> dict[str, str] | None:
    """The checksum of each file of an entry, by name; empty where an older version made it, None where it is damaged.

    Files are looked at for their sizes alone.
    """
    try:
        facts = read_json(folder / FACTS)
        if not isinstance(facts, dict) or not isinstance(files := facts.get("files"), dict) or not files:
            return None
        if any(require_file(folder / name) != size for name, size in files.items()):
            return None
    except UserError:
        return None
    if facts.keys() == {"files"}:
        return {}
    known = (unseal(facts) or {}).get("checksums")
    return known if isinstance(known, dict) and known.keys() == files.keys() else None


def is_entry(folder: Path) -> bool:
    """Whether a folder is an entry of a cache, damaged or not."""
    return re.fullmatch("[0-9a-f]{32}", folder.name) is not None and os.path.isdir(folder)


def is_stamp(path: Path) -> bool:
    """Whether a file of a cache keeps the hash of the file that was encoded, damaged or not."""
    return re.fullmatch("[0-9a-f]{32}[.]hash", path.name) is not None


def is_stamp_whole(path: Path) -> bool:
    """Whether such a file is as it was written."""
    try:
        known = read_json(path)
    except UserError:
        return False
    return isinstance(known, dict) and unseal(known) is not None


def _all_files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _is_whole(folder: Path) -> bool:
    """Whether an entry is there, as far as a quick check shows: large files are checked in the background of a run."""
    known = entry_checksums(folder)
    if known is None:
        return False
    small = {name for name in known if (folder / name).stat().st_size <= _SMALL}
    return all(checksum(folder / name) == known[name] for name in small - {TOKENS_FILE})


def content_hash(path: Path, roots: list[Path]) -> str:
    """SHA-256 of a file, which is read only if it may have changed since it was hashed last.

    Args:
        path: the file.
        roots: folders where the hash is looked for; the first that can be written to keeps it.

    Raises:
        UserError: the file cannot be read.
    """
    require_file(path)  # a path without end would not resolve
    stamp = f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.hash"
    try:
        state = path.stat()
        now = [state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns]
        for root in roots:
            if (known := _kept_hash(root / stamp, now)) is not None:
                return known
        started = time.time()
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    if started - state.st_mtime > _SETTLED:
        _keep_hash(roots, stamp, {"state": now, "sha256": sha256})
    return sha256


def _kept_hash(stamp: Path, state: list[int]) -> str | None:
    """The hash of a file in a state; None where it is not known, or the stamp is damaged."""
    try:
        known = read_json(stamp)
    except UserError:
        return None
    known = unseal(known) if isinstance(known, dict) else None
    return str(known.get("sha256")) if known is not None and known.get("state") == state else None


def _keep_hash(roots: list[Path], stamp: str, known: dict[str, Any]) -> None:
    for root in roots:
        with suppress(OSError):
            root.mkdir(parents=True, exist_ok=True)
            fresh = root / f"{stamp}.{os.getpid()}"
            fresh.write_text(json.dumps(seal(known)), encoding="utf-8")
            fresh.replace(root / stamp)
            return

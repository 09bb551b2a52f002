"""Cache of encoded JSON lines: entries are named by a hash of their inputs, and written atomically by one process."""

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

from threefold.data.stored_array import TOKENS_FILE
from threefold.errors import UserError
from threefold.files import checksum, checksums, read_json, require_file, seal, unseal
from threefold.output import staged_directory

CACHE_ENDING: Final = ".cache"
"""Suffix of a file's name for the folder with its cache."""
FACTS: Final = "meta.json"
"""File written last, with the size and checksum of every other file of the folder, and its own checksum."""
_SMALL: Final = 1 << 30
"""Bytes of the largest file that is checked each time it is opened."""
_SETTLED: Final = 2.0
"""Seconds after which a change of a file shows in its timestamp on any file system."""


def default_roots(path: Path) -> list[Path]:
    """Return the folders to search for a file's cache: next to the file, then the user's cache.

    A new cache goes to the first one that is writable. Earlier versions used the last one, ignoring XDG_CACHE_HOME.
    """
    beside = path.with_name(path.name + CACHE_ENDING)
    roots = [beside, user_cache_path("threefold", appauthor=False), Path.home() / ".cache" / "threefold"]
    return list(dict.fromkeys(roots))


def entry_name(facts: dict[str, Any]) -> str:
    """Return the folder name for content that depends on `facts` alone (plain JSON values)."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def cached(roots: list[Path], name: str, write: Callable[[Path], None]) -> Path:
    """Return the complete folder `name` in one of `roots`; create it with `write` if there is none.

    If several processes need it at once, one writes and the others wait. If the writer is killed, its partial output is
    discarded and the next one starts again.

    Args:
        roots: folders to search; the first writable one gets a new entry.
        name: name of the entry.
        write: function that fills the folder it is given.

    Raises:
        UserError: no root is writable, or the disk is full.
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
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends, however it ends
        except OSError as error:
            raise _CannotWrite(error.strerror) from None
        yield
    finally:
        os.close(lock)


def _write(folder: Path, write: Callable[[Path], None]) -> None:
    # All files count as ours: a folder with such a name is an entry of the cache, damaged or not.
    with staged_directory(folder, place="data.cache", listing=_all_files, marked=False) as partial:
        write(partial)
        paths = sorted(partial.iterdir())
        facts = {
            "files": {path.name: path.stat().st_size for path in paths},
            "checksums": dict(zip((path.name for path in paths), checksums(paths), strict=True)),
        }
        (partial / FACTS).write_text(json.dumps(seal(facts)) + "\n", encoding="utf-8")


def entry_checksums(folder: Path) -> dict[str, str] | None:
    """Return the checksum of each file of an entry, by name; None if the entry is damaged.

    Empty if an older version made the entry. Of the files themselves, only the sizes are checked.
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
    """Return whether a folder is named as a cache entry, damaged or not."""
    return re.fullmatch("[0-9a-f]{32}", folder.name) is not None and os.path.isdir(folder)


def is_stamp(path: Path) -> bool:
    """Return whether a file of a cache is named as the stored hash of an encoded file, damaged or not."""
    return re.fullmatch("[0-9a-f]{32}[.]hash", path.name) is not None


def is_stamp_whole(path: Path) -> bool:
    try:
        known = read_json(path)
    except UserError:
        return False
    return isinstance(known, dict) and unseal(known) is not None


def _all_files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def _is_whole(folder: Path) -> bool:
    """Return whether an entry is complete by a quick check; large files are verified in the background of a run."""
    known = entry_checksums(folder)
    if known is None:
        return False
    small = {name for name in known if (folder / name).stat().st_size <= _SMALL}
    return all(checksum(folder / name) == known[name] for name in small - {TOKENS_FILE})


def content_hash(path: Path, roots: list[Path]) -> str:
    """Return the SHA-256 of a file, reading it only if it may have changed since it was last hashed.

    Args:
        path: the file.
        roots: folders to search for the stored hash; the first writable one stores it.

    Raises:
        UserError: the file cannot be read.
    """
    require_file(path)  # first, as a loop of links would not resolve
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

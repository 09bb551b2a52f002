"""Cache of tokens: folders that are complete or not there, and their verification."""

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from threefold.checksums import checksum, checksums, seal, unseal
from threefold.data.corpus import TOKENS_FILE, damaged
from threefold.data.sources import is_json_lines
from threefold.errors import UserError
from threefold.files import read_json, require_file, shown
from threefold.output import Progress, staged_directory
from threefold.report.tokens import Audit, compare

CACHE_ENDING: Final = ".cache"  # suffix of a file's name for the folder with its cache
FACTS: Final = "meta.json"
"""File written last, with the size and checksum of every other file of the folder, and its own checksum."""


def cached(roots: list[Path], name: str, write: Callable[[Path], None]) -> Path:
    """Return the complete folder `name` in one of `roots`; create it with `write` if there is none.

    The first writable root gets a new entry. If several processes need it at once, one writes and the others wait. If
    the writer is killed, its partial output is discarded and the next one starts again.
    """
    for root in roots:
        if _is_whole(root / name):
            return root / name
    refusals = []
    for root in roots:
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = (root / f"{name}.lock").open("a")
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends, however it ends
        except OSError as error:
            refusals.append(f"{root} ({error.strerror})")
            continue
        with lock:
            if not _is_whole(root / name):
                # All files count as ours: a folder with such a name is an entry of the cache, damaged or not.
                with staged_directory(root / name, place="data.cache", listing=os.listdir, marked=False) as partial:
                    write(partial)
                    paths = sorted(partial.iterdir())
                    sums = dict(zip((path.name for path in paths), checksums(paths), strict=True))
                    facts = {"files": {path.name: path.stat().st_size for path in paths}, "checksums": sums}
                    (partial / FACTS).write_text(json.dumps(seal(facts)) + "\n", encoding="utf-8")
            return root / name
    raise UserError(f"no cache can be written in {' or '.join(refusals)}; set data.cache to a folder that can.")


def entry_checksums(folder: Path) -> dict[str, str] | None:
    """Return an entry's checksums by file, if the sizes are right; empty in old entries, None if damaged."""
    try:
        facts = read_json(folder / FACTS)
        files = facts.get("files") if isinstance(facts, dict) else None
        if not files or not isinstance(files, dict):
            return None
        if any(require_file(folder / name) != size for name, size in files.items()):
            return None
    except UserError:
        return None
    if facts.keys() == {"files"}:
        return {}
    known = (unseal(facts) or {}).get("checksums")
    return known if isinstance(known, dict) and known.keys() == files.keys() else None


def read_stamp(path: Path) -> dict[str, Any] | None:
    """Return the stored hash of an encoded file, with the file's state at that time; None if missing or damaged."""
    try:
        known = read_json(path)
    except UserError:
        return None
    return unseal(known) if isinstance(known, dict) else None


def _is_whole(folder: Path) -> bool:
    """Return whether an entry is complete by a quick check; large files are verified in the background of a run."""
    known = entry_checksums(folder)
    if known is None:
        return False
    small = {name for name in known if (folder / name).stat().st_size <= 1 << 30}
    return all(checksum(folder / name) == known[name] for name in small - {TOKENS_FILE})


def content_hash(path: Path, roots: list[Path]) -> str:
    """Return the SHA-256 of a file, which is stored in one of `roots` and read again only if it may have changed."""
    require_file(path)  # first, as a loop of links would not resolve
    stamp = f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.hash"
    try:
        stat = path.stat()
        state = [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns]
        for root in roots:
            if (known := read_stamp(root / stamp)) is not None and known.get("state") == state:
                return str(known.get("sha256"))
        started = time.time()
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    # After two seconds, a change of a file shows in its timestamp on any file system.
    for root in roots if started - stat.st_mtime > 2 else ():
        with suppress(OSError):
            root.mkdir(parents=True, exist_ok=True)
            fresh = root / f"{stamp}.{os.getpid()}"
            fresh.write_text(json.dumps(seal({"state": state, "sha256": sha256})), encoding="utf-8")
            fresh.replace(root / stamp)
            break
    return sha256


def audit_cache(path: Path, progress: Progress) -> list[Audit]:
    """Check a cache folder, or that of a file of JSON lines, by reading it; return no result for other files."""
    cache = path
    if is_json_lines(path) and os.path.isfile(path):
        cache = path.with_name(path.name + CACHE_ENDING)
        if not os.path.isdir(cache):
            raise UserError(f"{shown(cache)} does not exist, as no run has encoded these JSON lines yet.")
    inside = sorted(cache.iterdir()) if os.path.isdir(cache) else []
    found: list[Audit] = []
    for folder in [cache] if _is_entry(cache) else filter(_is_entry, inside):
        known, facts = entry_checksums(folder), folder / FACTS
        remedy = "delete that folder, which is a cache"
        if known is None:
            found.append(Audit(facts, None, "", f"{shown(facts)} or a size in it is wrong; {remedy}"))
            continue
        how = "as written" if known else "no checksums; the sizes are right"
        found += [Audit(facts, require_file(facts), how), *compare(folder, known, remedy, progress)]
    for file in filter(_is_stamp, inside):
        try:
            damage = "" if read_stamp(file) is not None else damaged(file, "delete it, a part of a cache")
            found.append(Audit(file, require_file(file), "as written", damage))
        except UserError as error:
            found.append(Audit(file, None, "", str(error)))
    return found


def _is_entry(folder: Path) -> bool:
    """Return whether a folder is named as a cache entry, damaged or not."""
    return re.fullmatch("[0-9a-f]{32}", folder.name) is not None and os.path.isdir(folder)


def _is_stamp(path: Path) -> bool:
    """Return whether a file of a cache is named as the stored hash of an encoded file, damaged or not."""
    return re.fullmatch("[0-9a-f]{32}[.]hash", path.name) is not None

"""JSON lines (JSONL), encoded once, into a cache whose entries are named by a hash of their inputs."""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from platformdirs import user_cache_path
from tokenizers import Tokenizer

from threefold.checksums import checksum, checksum_of, checksums, seal, unseal
from threefold.data.conversations import ChatTemplate, template_of
from threefold.data.corpus import (
    DOCUMENT_DTYPE,
    LOSS_MASK_FILE,
    TOKEN_DTYPES,
    TOKENS_FILE,
    Content,
    Corpus,
    DocumentWriter,
    StoredArray,
    dtype_for,
    load_column,
)
from threefold.data.encoding import EncodingSpec, encode_documents
from threefold.data.sources import SourceReader, holds_chat
from threefold.data.tokenizer import SpecialTokens, TextRule, find_end, id_count, load_tokenizer
from threefold.errors import UserError
from threefold.files import of_user, read_json, require_file, shown
from threefold.host import usable_cores
from threefold.output import Progress, staged_directory

LINES_FILE: Final = "lines.bin"


@dataclass(frozen=True)
class JsonLines:
    """File with one JSON object per line: its text or its messages under `key`."""

    path: Path
    tokenizer_file: Path
    key: str = "text"
    given_eod: int | None = None  # put after each text; None uses the tokenizer's usual one
    cache: Path | None = None  # None uses one next to the file, or the user's cache if that is not writable
    special_tokens: SpecialTokens = "parse"
    chat_template: Path | None = None  # None finds it next to the tokenizer

    @cached_property
    def holds_chat(self) -> bool:
        return holds_chat(self.path, self.key)

    @cached_property
    def rule(self) -> TextRule:
        return TextRule.of(self._tokenizer, self.special_tokens)

    @cached_property
    def template(self) -> ChatTemplate | None:
        return template_of(self.chat_template, self.tokenizer_file) if self.holds_chat else None

    @cached_property
    def vocab_size(self) -> int:
        return id_count(self._tokenizer)

    @cached_property
    def eod(self) -> int:
        eod = find_end(self._tokenizer) if self.given_eod is None else self.given_eod
        if eod is None:
            raise UserError(
                f"data.tokenizer {self.tokenizer_file} has no usual end-of-document token; set data.eod to its id."
            )
        if eod >= self.vocab_size:
            raise UserError(
                f"data.eod is {eod} but the vocabulary has {self.vocab_size} tokens; use at most {self.vocab_size - 1}."
            )
        return eod

    @cached_property
    def tokenizer_sha256(self) -> str:
        try:
            if self.tokenizer_file.exists():
                require_file(self.tokenizer_file, "data.tokenizer ")
            return hashlib.sha256(self.tokenizer_file.read_bytes()).hexdigest()
        except OSError as error:
            raise UserError(
                f"data.tokenizer is {self.tokenizer_file}, which cannot be read ({error.strerror}); "
                "give a tokenizer.json."
            ) from None

    def corpus(self, sequence_length: int, progress: Progress) -> Corpus:
        """Return the lines as tokens, from the cache or encoded now: texts cut (`encoded`), conversations whole."""
        if not self.holds_chat:
            return self.encoded(sequence_length, progress)
        template = self.template
        chat = {"template": template.template, "special_tokens": template.special_tokens} if template else {}
        folder = self._cached({"chat": chat}, None, progress)
        stored = self._stored(folder)
        mask = StoredArray(folder / LOSS_MASK_FILE, "u1", len(stored["tokens"]))
        return Corpus(**stored, remedy=f"delete its cache {folder}", loss_mask=mask, template=template)

    def encoded(self, sequence_length: int, progress: Progress) -> "EncodedLines":
        """Return texts, each cut to one token more than a sample holds; see `corpus`."""
        folder = self._cached({"sequence_length": sequence_length}, sequence_length + 1, progress)
        return EncodedLines(**self._stored(folder), remedy="delete that folder, which is a cache")

    def _stored(self, folder: Path) -> dict[str, Any]:
        """Return the content of a cache folder for a `Corpus`. Raises UserError if its files do not fit each other."""
        files = folder / TOKENS_FILE, folder / LINES_FILE
        dtype = np.dtype(TOKEN_DTYPES[dtype_for(self.vocab_size)])
        tokens = StoredArray(files[0], dtype, require_file(files[0]) // dtype.itemsize)
        lines = load_column(files[1], DOCUMENT_DTYPE, require_file(files[1]) // 8)
        if len(lines) < 2 or lines[0] != 0 or lines[-1] != len(tokens) or np.any(np.diff(lines) <= 0):
            raise UserError(f"{shown(files[1])} does not fit {TOKENS_FILE}; delete that folder, which is a cache.")
        return {
            "path": self.path,
            "files": files,
            "tokens": tokens,
            "documents": lines,
            "vocab_size": self.vocab_size,
            "eod": self.eod,
            "tokenizer_file": self.tokenizer_file,
            "rule": self.rule,
            "checksums": entry_checksums(folder) or {},
        }

    def _cached(self, further: dict[str, Any], longest: int | None, progress: Progress) -> Path:
        """Return the cache folder with the lines as tokens, cut to `longest`; `further` are inputs of the cache key."""
        if self.cache is not None:  # without a look at the home directory, which a container's user may not have
            roots = [self.cache]
        else:  # to the first that is writable
            beside = self.path.with_name(self.path.name + CACHE_ENDING)
            home = of_user(lambda: user_cache_path("threefold", appauthor=False))
            roots = [beside] if home is None else [beside, home]
        content = content_hash(self.path, roots)
        version = 1  # incremented when the same file, tokenizer and length give another cache
        given = {"key": self.key, "tokenizer": self.tokenizer_sha256, "eod": self.eod}
        rule = {"special_tokens": self.special_tokens, "beginning": self.rule.beginning}
        facts = {"version": version, "content": content, **given, **rule, **further}
        name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
        return cached(roots, name, partial(self._encode, content, longest, progress))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_file, "data.tokenizer")

    def _encode(self, content: str, longest: int | None, progress: Progress, folder: Path) -> None:
        size = self.path.stat().st_size
        progress.phase(f"Encoding {self.path.name}", size)
        reader = SourceReader(self.path, self.key, progress.advance, key_given_by="data.key")
        dtype = TOKEN_DTYPES[dtype_for(self.vocab_size)]
        encoding = EncodingSpec(self._tokenizer.to_str(), self.eod, dtype, self.rule, self.template)
        with DocumentWriter(folder, LINES_FILE, with_mask=longest is None) as writer:
            # Of a smaller file, encoding takes less time than starting processes.
            for batch in encode_documents(reader, encoding, usable_cores() if size > 32_000_000 else 1):
                if longest is None:
                    writer.write(batch.tokens, batch.lengths, batch.counted)
                    continue
                filled = batch.lengths > 1 + len(self.rule.beginning)  # more than the beginning and the end
                starts = np.cumsum(batch.lengths) - batch.lengths
                places = np.arange(len(batch.tokens)) - np.repeat(starts, batch.lengths)
                tokens = batch.tokens[(places < longest) & np.repeat(filled, batch.lengths)]
                writer.write(tokens, np.minimum(batch.lengths[filled], longest))
        if not writer.documents:
            raise UserError(f'{self.path} has no line with text under "{self.key}"; give a file that has some.')
        if reader.sha256 != content:
            raise UserError(f"{self.path} was changed while it was read; start again once it is complete.")


@dataclass(frozen=True, eq=False, kw_only=True)
class EncodedLines(Corpus):
    """Lines of text as tokens, in a folder of the cache, each cut to one token more than a sample holds."""

    def document_of(self, place: int) -> str:
        return super().document_of(place).replace("document", "line") + " with text"

    @cached_property
    def content(self) -> Content:
        """Checksums that the cache keeps; the one for the document starts covers all its files except the tokens."""
        known = dict(self.checksums)
        tokens = known.pop(TOKENS_FILE, None)
        rest = "".join(f"{name} {known[name]}\n" for name in sorted(known))
        dtype: Any = self.tokens.dtype.name
        return Content(dtype, checksum_of(rest.encode()) if known else "", tokens)


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

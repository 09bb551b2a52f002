"""Verification and statistics of token files, for `threefold data verify` and `threefold data show`."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from threefold.checksums import checksum
from threefold.data.corpus import META_FILE, Corpus, StoredTokens, damaged
from threefold.data.formats.registry import holds_tokens, is_prepared, read_stored
from threefold.data.formats.threefold_folder import TokenFiles
from threefold.data.samples import SPLITS, document_runs, token_runs
from threefold.data.tokenizer import id_count, load_tokenizer
from threefold.doors import call_hook
from threefold.errors import UserError
from threefold.files import require_file, shown
from threefold.output import Progress

_CHUNK: Final = 1 << 22


@dataclass(frozen=True)
class SplitFacts:
    name: str
    documents: int
    tokens: int
    samples: int


def split_facts(files: Corpus, split: str, sequence_length: int) -> list[SplitFacts]:
    """Return the size of each split of `files` under `split`, including empty ones. Raises like `document_counts`."""
    facts = []
    for name in SPLITS:
        runs = token_runs(files.documents, split, name)
        tokens = int(np.diff(runs).sum())
        is_one = files.document_count == 1  # which splits share
        documents = len(runs) if is_one else int(np.diff(document_runs(files.document_count, split, name)).sum())
        facts.append(SplitFacts(name, documents, tokens, max(0, tokens - 1) // sequence_length))
    return facts


@dataclass(frozen=True)
class TokenSummary:
    """Statistics of token files."""

    documents: int
    empty: int
    longest: int  # in tokens
    longest_document: int
    highest: int
    highest_place: int  # of the first
    common_end: int  # the token that most documents end with, among 10,000 spread over the files
    common_share: float  # of these that end with it


def summarize(stored: StoredTokens, progress: Progress) -> TokenSummary:
    """Compute the statistics in one pass over the tokens. Raises UserError if a token is negative."""
    lengths = np.diff(stored.documents)
    filled = np.flatnonzero(lengths)
    some = filled[np.linspace(0, len(filled) - 1, min(len(filled), 10_000)).astype(np.int64)]
    ends, counts = np.unique(stored.tokens[stored.documents[some + 1] - 1], return_counts=True)
    longest, common = int(np.argmax(lengths)), int(np.argmax(counts))
    highest = highest_place = -1
    progress.phase("Looking at every token", stored.tokens.nbytes)
    for start in range(0, len(stored.tokens), _CHUNK):
        chunk = stored.tokens[start : start + _CHUNK]
        if chunk.min() < 0:
            place = int(np.argmax(chunk < 0))
            raise UserError(f"{_holds(stored, str(chunk[place]), start + place)}, so it is damaged.")
        place = int(np.argmax(chunk))
        if chunk[place] > highest:
            highest, highest_place = int(chunk[place]), start + place
        progress.advance(chunk.nbytes)
    fraction = float(counts[common] / counts.sum())
    sizes = len(lengths), len(lengths) - len(filled), int(lengths[longest]), longest
    return TokenSummary(*sizes, highest, highest_place, int(ends[common]), fraction)


def _holds(stored: StoredTokens, token: str, place: int) -> str:
    document = int(np.searchsorted(stored.documents, place, side="right")) - 1
    return f"{shown(stored.files[0])} holds token {token} at position {place:,} (document {document:,})"


@dataclass(frozen=True)
class Audit:
    """Result of checking one file: its size (None if it has none), the finding, and the problem if it is damaged."""

    path: Path
    bytes: int | None
    found: str
    problem: str = ""


def audit(path: Path, tokenizer: Path | None, progress: Progress) -> list[Audit]:
    """Check all files of a corpus by reading them, and return the result for each.

    Folders of this program have checksums; other files are checked for consistency and for tokens outside the
    vocabulary, that of `tokenizer`. `path` may also be a file of JSON lines, whose cached tokens are checked, or a
    cache folder.
    """
    found: list[Audit] | None = call_hook("audit_cache", path, progress)
    if found:
        return found
    if is_prepared(path) and os.path.isdir(path):
        return list(_audit_folder(path, progress))
    return _audit_foreign(path, tokenizer, progress)


def _audit_folder(folder: Path, progress: Progress) -> Iterator[Audit]:
    meta_file = folder / META_FILE
    try:
        files = TokenFiles.open(folder)
    except UserError as error:
        if not os.path.lexists(meta_file):
            raise
        yield Audit(folder, None, "", str(error))
        return
    yield Audit(meta_file, require_file(meta_file), "as written")
    yield from compare(folder, files.meta.checksums, "prepare the data again with `threefold data prepare`", progress)


def compare(folder: Path, known: dict[str, str], remedy: str, progress: Progress) -> Iterator[Audit]:
    """Read the files of a folder and compare them with the checksums known of them."""
    for name, written in sorted(known.items()):
        path = folder / name
        try:
            size = require_file(path)
            progress.phase(f"Reading {name}", size)
            problem = "" if checksum(path, progress.advance) == written else damaged(path, remedy)
            yield Audit(path, size, "as written", problem)
        except UserError as error:
            yield Audit(path, None, "", str(error))
        except OSError as error:
            yield Audit(path, None, "", f"{shown(path)} cannot be read ({error.strerror}); {remedy}")


def _audit_foreign(path: Path, tokenizer: Path | None, progress: Progress) -> list[Audit]:
    if not holds_tokens(path):
        read_stored(path)  # raises an error that names what is missing
    rows = id_count(load_tokenizer(tokenizer)) if tokenizer is not None else None
    try:
        stored = read_stored(path)
        summary = summarize(stored, progress)
        if rows is not None and summary.highest >= rows:
            held = _holds(stored, f"{summary.highest:,}", summary.highest_place)
            raise UserError(f"{held}, outside the vocabulary of {rows:,} tokens of {tokenizer}")
    except UserError as error:
        return [Audit(path, None, "", str(error))]
    ids = f"highest token {summary.highest:,}" if rows is None else "tokens in the vocabulary"
    tokens, *index = stored.files
    found = [Audit(tokens, require_file(tokens), f"{stored.format} has no checksums; {ids}")]
    return found + [Audit(file, require_file(file), "no checksum; fits the tokens") for file in index]

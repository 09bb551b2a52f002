"""Conversion of token files between formats."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from threefold.data.corpus import TOKEN_DTYPES, TOKENIZER_FILE, DocumentWriter, dtype_for
from threefold.data.formats.registry import is_prepared, open_corpus, read_stored, token_formats, with_ending
from threefold.data.formats.threefold_folder import Meta, SourceFile, list_token_files
from threefold.data.preparation import complete_folder
from threefold.data.tokenizer import end_of_document, load_tokenizer
from threefold.errors import UserError
from threefold.files import shown
from threefold.output import Progress, check_name, check_replaceable, staged_directory, staged_files
from threefold.plugins import one_of
from threefold.random import Int64Array

THREEFOLD: Final = "threefold"  # name of this program's own token format
_CHUNK: Final = 1 << 22  # tokens that are processed at once; a longer document is one piece


@dataclass(frozen=True)
class ConvertedTokens:
    """Number of tokens and documents written by a conversion."""

    tokens: int
    documents: int
    left_out: int = 0  # empty documents, which the new format cannot hold
    ended: int = 0  # documents that got an end-of-document token, which the new format requires


def convert(
    source: Path, to: str, out: Path, tokenizer: Path | None, eod: str | None, overwrite: bool, progress: Progress
) -> ConvertedTokens:
    """Convert token files of any system to another format, or to `threefold`, atomically; `out` may be a prefix."""
    if to == THREEFOLD:
        return to_threefold(source, out, tokenizer, eod, overwrite, progress)
    formats = token_formats()
    write = formats[to].write if to in formats else None
    if write is None:
        writable = [name for name, known in formats.items() if known.write is not None]
        raise UserError(f"--to is {shown(repr(to))} but must be {one_of(to, [*writable, THREEFOLD])}.")
    check_name(out, "--out")
    name, endings = out.name, formats[to].endings
    for ending in endings:
        name = name.removesuffix(ending)
    if not name:
        raise UserError(f"--out {out} has no name before {out.name}; give a prefix such as {out.with_name('tokens')}")
    prefix, stored = out.with_name(name), read_stored(source)
    _require_no_mask(source)
    names = [with_ending(prefix, ending).name for ending in reversed(endings)]  # the tokens last
    with staged_files(prefix, names, inputs=stored.files, overwrite=overwrite) as folder:
        write(stored, folder / name, progress)
    return ConvertedTokens(len(stored.tokens), len(stored.documents) - 1)


def _require_no_mask(source: Path) -> None:
    if is_prepared(source) and Meta.read(source).loss_mask:
        raise UserError(
            f"{source} holds conversations with a loss mask, which a conversion would lose; use the folder as it is."
        )


def to_threefold(
    source: Path, out: Path, tokenizer: Path | None, end: str | None, overwrite: bool, progress: Progress
) -> ConvertedTokens:
    """Write a folder like those of `threefold data prepare` atomically.

    This format needs a tokenizer, and non-empty documents that end with its end-of-document token `end`: empty
    documents are left out, and those without the token get it.
    """
    read = [source] if tokenizer is None else [source, tokenizer]
    check_replaceable(out, read, overwrite, listing=list_token_files)
    if tokenizer is None and not is_prepared(source):
        raise UserError(
            f"{source} comes without the tokenizer that --to threefold needs; give its tokenizer.json with --tokenizer"
        )
    tokenizer = tokenizer or source / TOKENIZER_FILE
    loaded, stored = load_tokenizer(tokenizer), read_stored(source)
    _require_no_mask(source)
    corpus = open_corpus(source, tokenizer=tokenizer)
    read = [*stored.files, tokenizer]
    eod = end_of_document(loaded, end) if corpus.eod is None or end is not None else corpus.eod
    left_out = ended = 0
    with staged_directory(out, inputs=read, overwrite=overwrite, listing=list_token_files, marked=False) as folder:
        dtype = np.dtype(TOKEN_DTYPES[dtype_for(corpus.vocab_size)])
        progress.phase("Converting", stored.tokens.nbytes)
        with DocumentWriter(folder) as writer:
            for first, last in _ranges(corpus.documents):
                starts = corpus.documents[first : last + 1]
                tokens = corpus.tokens[starts[0] : starts[-1]]
                corpus.check_tokens(tokens, int(starts[0]))
                lengths = np.diff(starts)
                filled = lengths > 0
                ends = (starts[1:] - starts[0])[filled]
                unended = ends[tokens[ends - 1] != eod]
                writer.write(np.insert(tokens.astype(dtype), unended, eod), lengths[filled] + np.isin(ends, unended))
                left_out, ended = left_out + (last - first - len(ends)), ended + len(unended)
                progress.advance(tokens.nbytes)
        if not writer.documents:
            raise UserError(f"{source} has only empty documents, so there is nothing to convert")
        path = stored.files[0]
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        made_of = SourceFile(os.fspath(path), path.stat().st_size, len(stored.documents) - 1, digest)
        complete_folder(
            folder, writer, tokenizer.read_bytes(), corpus.vocab_size, eod, corpus.rule, [made_of], 0, False
        )
    return ConvertedTokens(writer.tokens, writer.documents, left_out, ended)


def _ranges(documents: Int64Array) -> Iterator[tuple[int, int]]:
    """Yield ranges of consecutive documents with about `_CHUNK` tokens: the first document, and one past the last."""
    first, count = 0, len(documents) - 1
    while first < count:
        end = int(np.searchsorted(documents, documents[first] + _CHUNK, side="right")) - 1
        end = min(max(end, first + 1), count)
        yield first, end
        first = end

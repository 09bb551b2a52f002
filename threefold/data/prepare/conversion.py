"""Converting token files from one format to another: `threefold data convert`."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from threefold.data.corpus import Corpus, StoredTokens
from threefold.data.formats.registry import TokenFormat, token_formats, with_ending
from threefold.data.formats.threefold_meta import Meta, SourceFile, file_checksums, list_token_files
from threefold.data.formats.token_files import is_own, open_corpus, read_stored
from threefold.data.progress import Progress
from threefold.data.text.tokenizer import end_of_document, load_tokenizer
from threefold.data.token_storage import (
    DOCUMENT_DTYPE,
    DOCUMENTS_FILE,
    DTYPES,
    META_FILE,
    TOKENIZER_FILE,
    TOKENS_FILE,
    dtype_for,
)
from threefold.errors import UserError
from threefold.files import shown
from threefold.output.overwrite import check_name, check_replaceable
from threefold.output.staging import staged_directory, staged_files
from threefold.plugins import one_of
from threefold.random.permutation import Int64Array

THREEFOLD: Final = "threefold"
"""The name of this program's own format."""
_CHUNK: Final = 1 << 22
"""Tokens that are worked on at once; a longer document is one piece."""


@dataclass(frozen=True)
class ConvertedTokens:
    """What a conversion made.

    Attributes:
        tokens, documents: how many were written.
        left_out: empty documents, which the new format cannot hold.
        ended: documents that got an end-of-document token, which the new format requires.
    """

    tokens: int
    documents: int
    left_out: int = 0
    ended: int = 0


def convert(
    source: Path, to: str, out: Path, tokenizer: Path | None, eod: str | None, overwrite: bool, progress: Progress
) -> ConvertedTokens:
    """Write token files in another format, all of them or none.

    Args:
        source: token files of any system.
        to: `threefold`, or the name of a token format that can be written.
        out: the folder to make, or the prefix of the files.
        tokenizer: for `threefold`, a tokenizer.json; None where the source has its own.
        eod: for `threefold`, the name of its end-of-document token; None finds a usual one.
        overwrite: whether an output of this program at `out` may be replaced.
        progress: of the bytes that are converted.

    Raises:
        UserError: the format is unknown or cannot hold the tokens, the source cannot be read, its tokenizer is unknown
            or another, or `out` cannot be written.
    """
    if to == THREEFOLD:
        return to_threefold(source, out, tokenizer, eod, overwrite, progress)
    formats = token_formats()
    if to not in formats or formats[to].write is None:
        writable = [name for name, known in formats.items() if known.write is not None]
        raise UserError(f"--to is {shown(repr(to))} but must be {one_of(to, [*writable, THREEFOLD])}.")
    return to_prefix(source, formats[to], out, overwrite, progress)


def to_prefix(source: Path, format_: TokenFormat, out: Path, overwrite: bool, progress: Progress) -> ConvertedTokens:
    """Write the files of a prefix, such as OUT.bin and OUT.idx of Megatron-LM, all or none.

    Raises:
        UserError: the source cannot be read, the format cannot hold it, or `out` cannot be written.
    """
    check_name(out, "--out")
    name = out.name
    for ending in format_.endings:
        name = name.removesuffix(ending)
    if not name:
        raise UserError(f"--out {out} has no name before {out.name}; give a prefix such as {out.with_name('tokens')}")
    prefix = out.with_name(name)
    stored = read_stored(source)
    _require_no_mask(source)
    assert format_.write is not None
    names = [with_ending(prefix, ending).name for ending in reversed(format_.endings)]  # the tokens last
    with staged_files(prefix, names, inputs=stored.files, overwrite=overwrite) as folder:
        format_.write(stored, folder / name, progress)
    return ConvertedTokens(len(stored.tokens), len(stored.documents) - 1)


def _require_no_mask(source: Path) -> None:
    """Check that nothing would be lost that says which tokens count.

    Raises:
        UserError: it would.
    """
    if is_own(source) and Meta.read(source).loss_mask:
        raise UserError(
            f"{source} holds conversations with a loss mask, which a conversion would lose; use the folder as it is."
        )


def to_threefold(
    source: Path, out: Path, tokenizer: Path | None, end: str | None, overwrite: bool, progress: Progress
) -> ConvertedTokens:
    """Write a folder such as `threefold data prepare` makes, whole or not at all.

    That format needs a tokenizer, and documents that are not empty and end with its end-of-document token: empty ones
    are left out, and those without the token get it.

    Args:
        source: token files of any system.
        out: the folder to make.
        tokenizer: a tokenizer.json; None where the source has its own.
        end: the name of its end-of-document token; None finds a usual one.
        overwrite: whether token files at `out` may be replaced.
        progress: of the bytes that are converted.

    Raises:
        UserError: the source cannot be read, its tokenizer is unknown or another, or `out` cannot be written.
    """
    read = [source] if tokenizer is None else [source, tokenizer]
    check_replaceable(out, read, overwrite, listing=list_token_files)
    if tokenizer is None and not is_own(source):
        raise UserError(
            f"{source} comes without the tokenizer that --to threefold needs; give its tokenizer.json with --tokenizer"
        )
    tokenizer = tokenizer or source / TOKENIZER_FILE
    loaded, stored = load_tokenizer(tokenizer), read_stored(source)
    _require_no_mask(source)
    corpus = open_corpus(source, tokenizer=tokenizer)
    read = [*stored.files, tokenizer]
    eod = end_of_document(loaded, end) if corpus.eod is None or end is not None else corpus.eod
    with staged_directory(out, inputs=read, overwrite=overwrite, listing=list_token_files, marked=False) as folder:
        dtype = dtype_for(corpus.vocab_size)
        progress.phase("Converting", stored.tokens.nbytes)
        converted = _write_documents(folder, corpus, eod, np.dtype(DTYPES[dtype]), progress)
        if not converted.documents:
            raise UserError(f"{source} has only empty documents, so there is nothing to convert")
        text = tokenizer.read_bytes()
        (folder / TOKENIZER_FILE).write_bytes(text)
        Meta(
            dtype=dtype,
            vocab_size=corpus.vocab_size,
            eod=eod,
            tokens=converted.tokens,
            documents=converted.documents,
            text_bytes=0,
            tokenizer_sha256=hashlib.sha256(text).hexdigest(),
            sources=(_source(stored),),
            special_tokens=corpus.rule.special_tokens,
            beginning=corpus.rule.beginning,
            checksums=file_checksums(folder),
        ).write(folder / META_FILE)
    return converted


def _write_documents(folder: Path, corpus: Corpus, eod: int, dtype: np.dtype, progress: Progress) -> ConvertedTokens:
    end = count = left_out = ended = 0
    with (folder / TOKENS_FILE).open("wb") as tokens_file, (folder / DOCUMENTS_FILE).open("wb") as documents_file:
        documents_file.write(np.zeros(1, dtype=DOCUMENT_DTYPE).tobytes())
        for first, last in _batches(corpus.documents):
            starts = corpus.documents[first : last + 1]
            tokens = corpus.tokens[starts[0] : starts[-1]]
            corpus.check_tokens(tokens, int(starts[0]))
            lengths = np.diff(starts)
            ends = (starts[1:] - starts[0])[lengths > 0]
            unended = ends[tokens[ends - 1] != eod]
            written = np.insert(tokens.astype(dtype), unended, eod)
            lengths = lengths[lengths > 0] + np.isin(ends, unended)
            tokens_file.write(written.data)
            documents_file.write((end + np.cumsum(lengths)).astype(DOCUMENT_DTYPE).data)
            end, count = end + len(written), count + len(ends)
            left_out, ended = left_out + (last - first - len(ends)), ended + len(unended)
            progress.advance(tokens.nbytes)
    return ConvertedTokens(end, count, left_out, ended)


def _batches(documents: Int64Array) -> Iterator[tuple[int, int]]:
    """Neighbouring documents of about `_CHUNK` tokens together: the first, and the one after the last."""
    first, count = 0, len(documents) - 1
    while first < count:
        end = int(np.searchsorted(documents, documents[first] + _CHUNK, side="right")) - 1
        end = min(max(end, first + 1), count)
        yield first, end
        first = end


def _source(stored: StoredTokens) -> SourceFile:
    path = stored.files[0]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return SourceFile(os.fspath(path), path.stat().st_size, len(stored.documents) - 1, digest)

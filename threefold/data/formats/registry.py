"""Token formats of other systems, and functions that open any of them.

An attached room adds formats in `TOKEN_FORMATS` of its door, an installed package by entry points of the group
`threefold.token_formats`; each names a `TokenFormat`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from threefold.data.corpus import META_FILE, Corpus, StoredTokens
from threefold.data.formats.threefold_folder import TokenFiles
from threefold.data.sources import is_json_lines
from threefold.data.tokenizer import SpecialTokens, TextRule, beginning_of, find_end, id_count, load_tokenizer
from threefold.doors import added
from threefold.errors import UserError
from threefold.files import first_of
from threefold.output import Progress
from threefold.plugins import Registry

TOKEN_FORMATS: Final = Registry("The token format", "threefold.token_formats", added("TOKEN_FORMATS"))


@dataclass(frozen=True)
class TokenFormat:
    """Token files that share a prefix: PREFIX with each of the endings, the token file's first.

    `read` raises UserError if a file is missing, truncated or contradictory. `write` writes all files of a prefix and
    reports progress in bytes of tokens; it raises UserError if the format cannot hold the tokens. It is None if
    `threefold data convert` cannot write the format.
    """

    endings: tuple[str, ...]
    read: Callable[[Path], StoredTokens]
    write: Callable[[StoredTokens, Path, Progress], None] | None = None


def token_formats() -> dict[str, TokenFormat]:
    """Return all formats by name, including installed packages'."""
    return {name: TOKEN_FORMATS.load(name) for name in TOKEN_FORMATS.names()}


def with_ending(prefix: Path, ending: str) -> Path:
    """Append `ending` to the name of `prefix`, which may contain dots."""
    return prefix.with_name(prefix.name + ending)


def open_corpus(
    path: Path | str,
    *,
    tokenizer: Path | None = None,
    eod: int | None = None,
    vocab_size: int | None = None,
    special_tokens: SpecialTokens | None = None,
) -> Corpus:
    """Open the corpus at `path`: a folder of `threefold data prepare`, or token files of another system.

    `eod` None is the tokenizer's usual end-of-document token, if the first and the last document end with it.
    """
    path = Path(path)
    if is_prepared(path):
        files = TokenFiles.open(path)
        if tokenizer is not None:
            load_tokenizer(tokenizer, "data.tokenizer")
            if tokenizer.read_bytes() != files.tokenizer_file.read_bytes():
                raise UserError(f"data.tokenizer is {tokenizer} but {path} was made with the one in it; leave it out.")
        if eod is not None and eod != files.eod:
            raise UserError(f"data.eod is {eod} but {path} was made with {files.eod}; use {files.eod} or leave it out.")
        if special_tokens not in (None, made := files.meta.special_tokens):
            raise UserError(
                f"data.special_tokens is {special_tokens} but {path} was made with {made}; leave it out, or prepare "
                f"the data again with --special-tokens {special_tokens}."
            )
        return files
    stored = read_stored(path)
    loaded = None if tokenizer is None else load_tokenizer(tokenizer, "data.tokenizer")
    if loaded is not None:
        vocab_size = id_count(loaded)
    if vocab_size is None:
        raise UserError(
            f"{stored.path} ({stored.format}) holds tokens without their tokenizer; set data.tokenizer to its "
            "tokenizer.json, or model.vocab_size to its number of tokens."
        )
    if eod is not None and eod >= vocab_size:
        raise UserError(f"data.eod is {eod} but the vocabulary has {vocab_size} tokens; use at most {vocab_size - 1}.")
    beginning: tuple[int, ...] = ()
    if loaded is not None:
        filled = np.flatnonzero(np.diff(stored.documents))[[0, -1]]
        starts, ends = stored.documents[filled], stored.documents[filled + 1]
        usual = find_end(loaded)
        if eod is None and usual is not None and np.all(stored.tokens[ends - 1] == usual):
            eod = usual
        before = beginning_of(loaded)
        if all(tuple(stored.tokens[start : start + len(before)].tolist()) == before for start in starts):
            beginning = before
    return Corpus(
        path=stored.path,
        files=stored.files,
        tokens=stored.tokens,
        documents=stored.documents,
        vocab_size=vocab_size,
        eod=eod,
        tokenizer_file=tokenizer,
        remedy="give the tokenizer or the model.vocab_size that its tokens were made for, or make them again",
        rule=TextRule(special_tokens or "parse", beginning, special_tokens is None),
    )


def holds_tokens(path: Path) -> bool:
    return os.path.lexists(path / META_FILE) or bool(_find(path))


def read_stored(path: Path) -> StoredTokens:
    """Read the token files of any system at `path`. Raises UserError if there are none, several or damaged ones."""
    if is_json_lines(path):
        raise UserError(
            f"{path} holds text and no tokens; make these with `threefold data prepare {path} --out FOLDER`, or give "
            "it to a run as data.path with a data.tokenizer."
        )
    if is_prepared(path):
        return TokenFiles.open(path).stored()
    found = _find(path)
    if len(found) > 1:
        names = first_of((prefix.name + format_.endings[0] for prefix, format_ in found), 3)
        raise UserError(f"{path} names several token files ({names}); name one of them.")
    prefix, format_ = found[0]
    return format_.read(prefix)


def is_prepared(path: Path) -> bool:
    """Return whether to read `path` as a folder of `threefold data prepare`; its reader reports what is missing."""
    return os.path.lexists(path / META_FILE) or not _find(path)


def _find(path: Path) -> list[tuple[Path, TokenFormat]]:
    """Return the prefix and the format of token files at a path: a folder, a prefix, or one of the files."""
    formats = list(token_formats().values())
    endings = [(ending, format_) for format_ in formats for ending in format_.endings]

    def has(prefix: Path, ending: str) -> bool:
        return os.path.isfile(with_ending(prefix, ending))

    if os.path.isdir(path):
        inside: dict[tuple[Path, TokenFormat], None] = {}
        for name in sorted(os.listdir(path)):
            for ending, format_ in endings:
                prefix = path / name.removesuffix(ending)
                if name.endswith(ending) and name != ending and all(has(prefix, each) for each in format_.endings):
                    inside[prefix, format_] = None
        if inside:
            return list(inside)
    if not path.name:  # the current folder, or the root
        return []
    for ending, format_ in endings:
        if path.name.endswith(ending) and path.name != ending and os.path.isfile(path):
            return [(path.with_name(path.name.removesuffix(ending)), format_)]
    return [(path, format_) for format_ in formats if any(has(path, ending) for ending in format_.endings)]

"""The format of a folder of token files, and its meta.json, for the writer and the reader.

tokens.bin      every document's tokens back to back, each text ended by the end-of-document token;
                uint16 for a vocabulary below 65,500, else int32, little endian
documents.bin   int64 little endian [documents + 1]: where each document starts in tokens.bin; the last is the end
loss_mask.bin   uint8 [tokens], only where there are conversations or prompts: 1 where the token has a label in
                the loss; the documents then end as their chat template ends them
tokenizer.json  the tokenizer, as the `tokenizers` library stores it
meta.json       `Meta`, below, and a checksum of itself
"""

import dataclasses
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

from threefold.checksums import checksums
from threefold.data.text.text_encoding import BEFORE_RULES, SpecialTokens, TextRule
from threefold.data.token_storage import DOCUMENTS_FILE, DTYPES, LOSS_MASK_FILE, META_FILE, TOKENIZER_FILE, TOKENS_FILE
from threefold.errors import UserError
from threefold.files import read_json, shown
from threefold.sealed_json import seal, unseal

FORMAT: Final = "threefold-tokens"
VERSION: Final = 2
_WITHOUT_CHECKSUMS: Final = 1
_AGAIN: Final = "prepare the data again"
_LARGEST_COUNT: Final = 1 << 60

CHECKED: Final = frozenset({TOKENS_FILE, DOCUMENTS_FILE, TOKENIZER_FILE})
"""The files whose checksums meta.json has."""
CHAT_FILES: Final = frozenset({LOSS_MASK_FILE, "chat_template.jinja", "tokenizer_config.json"})
"""Further ones of folders with conversations."""


@dataclass(frozen=True)
class SourceFile:
    """One file the documents came from: its name as given, its size in bytes, its documents, its SHA-256."""

    name: str
    bytes: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class Meta:
    """The facts of a folder of token files.

    Attributes:
        dtype: key of `DTYPES`.
        vocab_size: number of token ids, special tokens included.
        eod: id of the end-of-document token.
        tokens: number of tokens, end-of-document tokens included.
        documents: number of documents.
        text_bytes: bytes of the documents' text as UTF-8; 0 where it is unknown.
        tokenizer_sha256: SHA-256 of tokenizer.json.
        sources: the files the documents came from, in order.
        special_tokens: what became of text that spells a special token: `parse` or `text`.
        beginning: tokens that each text begins with, before its own.
        loss_mask: whether there is a file that says which tokens count.
        checksums: of each other file of the folder, by name; empty in folders of version 1.
    """

    dtype: str
    vocab_size: int
    eod: int
    tokens: int
    documents: int
    text_bytes: int
    tokenizer_sha256: str
    sources: tuple[SourceFile, ...]
    special_tokens: SpecialTokens = BEFORE_RULES.special_tokens
    beginning: tuple[int, ...] = BEFORE_RULES.beginning
    loss_mask: bool = False
    checksums: Mapping[str, str] = field(default_factory=dict)

    @property
    def rule(self) -> TextRule:
        """How the text became tokens."""
        return TextRule(self.special_tokens, self.beginning)

    def write(self, path: Path) -> None:
        version = VERSION if self.checksums else _WITHOUT_CHECKSUMS
        facts = {"format": FORMAT, "version": version, **dataclasses.asdict(self)}
        if self.checksums:
            facts = seal(facts)
        else:
            del facts["checksums"]
        path.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "Meta":
        """Read DIRECTORY/meta.json.

        Raises:
            UserError: there is none, or it is damaged or not one this version can read.
        """
        path = directory / META_FILE
        if not os.path.lexists(path):
            raise UserError(_no_token_files(directory))
        try:
            facts = read_json(path)
        except UserError as error:
            raise UserError(f"{str(error).rstrip('.')}; {_AGAIN}") from None
        if not isinstance(facts, dict) or facts.pop("format", None) != FORMAT:
            raise UserError(f"{shown(path)} describes no token files; give a folder made by `threefold data prepare`")
        version = facts.pop("version", None)
        if type(version) is not int or not _WITHOUT_CHECKSUMS <= version <= VERSION:
            raise UserError(
                f"{shown(path)} has version {shown(repr(version))} of the format and this Threefold reads versions "
                f"{_WITHOUT_CHECKSUMS} and {VERSION}"
            )
        if version == VERSION:
            if unseal({"format": FORMAT, "version": version, **facts}) is None:
                raise UserError(f"{shown(path)} is damaged (its checksum is not the one that was written); {_AGAIN}")
            del facts["checksum"]
        return cls._from_facts(facts, path, has_checksums=version == VERSION)

    @classmethod
    def _from_facts(cls, facts: dict[str, Any], path: Path, has_checksums: bool) -> "Meta":
        for name, is_valid in _FIELDS.items():
            if name == "checksums" and not has_checksums:
                continue
            if name not in facts:
                raise UserError(f"{shown(path)} is damaged (it has no {name}); {_AGAIN}")
            if not is_valid(facts[name]):
                value = shown(json.dumps(facts[name], default=repr))
                raise UserError(f"{shown(path)} is damaged (its {name} is {value}); {_AGAIN}")
        for name, is_valid in _OPTIONAL.items():
            if name in facts and not is_valid(facts[name]):
                value = shown(json.dumps(facts[name], default=repr))
                raise UserError(f"{shown(path)} is damaged (its {name} is {value}); {_AGAIN}")
        allowed = (_FIELDS.keys() | _OPTIONAL.keys()) - (set() if has_checksums else {"checksums"})
        if unknown := facts.keys() - allowed:
            raise UserError(f"{shown(path)} is damaged (it has an unknown {shown(min(unknown))}); {_AGAIN}")
        sources = tuple(SourceFile(**source) for source in facts.pop("sources"))
        return cls(**facts | {"beginning": tuple(facts.get("beginning", ()))}, sources=sources)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST_COUNT


def _is_positive(value: object) -> bool:
    return _is_count(value) and value != 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_source(value: object) -> bool:
    kinds = {"name": _is_text, "bytes": _is_count, "documents": _is_count, "sha256": _is_text}
    return (
        isinstance(value, dict)
        and value.keys() == kinds.keys()
        and all(is_valid(value[name]) for name, is_valid in kinds.items())
    )


_FIELDS: Final = {
    "dtype": lambda value: _is_text(value) and value in DTYPES,
    "vocab_size": _is_positive,
    "eod": _is_count,
    "tokens": _is_positive,
    "documents": _is_positive,
    "text_bytes": _is_count,
    "tokenizer_sha256": _is_text,
    "sources": lambda value: isinstance(value, list) and all(map(_is_source, value)),
    "checksums": lambda value: (
        isinstance(value, dict)
        and CHECKED <= value.keys() <= CHECKED | CHAT_FILES
        and all(map(_is_text, value.values()))
    ),
}
# Folders of a version that knew neither loss masks nor rules of special tokens do not have these.
_OPTIONAL: Final = {
    "special_tokens": lambda value: value in get_args(SpecialTokens),
    "beginning": lambda value: isinstance(value, list) and all(map(_is_count, value)),
    "loss_mask": lambda value: isinstance(value, bool),
}


def file_checksums(folder: Path) -> dict[str, str]:
    """The checksum of each file of a folder of token files, all but meta.json, which is to keep them."""
    names = sorted(name for name in CHECKED | CHAT_FILES if name in CHECKED or (folder / name).exists())
    return dict(zip(names, checksums(folder / name for name in names), strict=True))


def list_token_files(folder: Path) -> Collection[str] | None:
    """The names of the files of a folder of token files, of any version; None if it is none."""
    try:
        facts = read_json(folder / META_FILE)
    except UserError:
        return None
    return {META_FILE, *CHECKED, *CHAT_FILES} if isinstance(facts, dict) and facts.get("format") == FORMAT else None


def _no_token_files(directory: Path) -> str:
    if not os.path.exists(directory):
        name = shown(directory)
        return f"{name} does not exist; make token files with `threefold data prepare INPUT --out {name}`"
    return (
        f"{shown(directory)} holds no token files (it has no {META_FILE}); "
        "give a folder made by `threefold data prepare INPUT --out FOLDER`, or whole files of another system: "
        "PREFIX.bin with PREFIX.idx, PREFIX_ids.npy with PREFIX_idx.npz, or PREFIX_ids.npz"
    )

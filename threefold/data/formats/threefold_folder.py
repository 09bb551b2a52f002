"""Format of a folder of token files and its meta.json, for the writer and the reader.

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
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from pydantic import Field

from threefold.checksums import checksum, checksums, seal, unseal
from threefold.constants import MOST_IDS
from threefold.data.conversations import template_of
from threefold.data.corpus import (
    DOCUMENT_DTYPE,
    DOCUMENTS_FILE,
    LOSS_MASK_FILE,
    META_FILE,
    TOKEN_DTYPES,
    TOKENIZER_FILE,
    TOKENS_FILE,
    Corpus,
    StoredArray,
    StoredTokens,
    damaged,
    load_column,
)
from threefold.data.tokenizer import SpecialTokens, TextRule
from threefold.errors import UserError
from threefold.files import STRICT, WrongFact, parse_facts, read_json, require_file, shown

FORMAT: Final = "threefold-tokens"
VERSION: Final = 1
_PREPARE_AGAIN: Final = "prepare the data again"

Count = Annotated[int, Field(ge=0, lt=1 << 60)]
Positive = Annotated[int, Field(gt=0, lt=1 << 60)]
VocabSize = Annotated[int, Field(gt=0, le=MOST_IDS)]

CHECKED: Final = frozenset({TOKENS_FILE, DOCUMENTS_FILE, TOKENIZER_FILE})  # files whose checksums meta.json always has
CHAT_FILES: Final = frozenset({LOSS_MASK_FILE, "chat_template.jinja", "tokenizer_config.json"})
"""Further files of folders with conversations."""


@dataclass(frozen=True)
class SourceFile:
    """A file that documents came from: its name as given, size in bytes, number of documents, and SHA-256."""

    name: str
    bytes: Count
    documents: Count
    sha256: str
    __pydantic_config__: ClassVar[Any] = STRICT


@dataclass(frozen=True)
class Meta:
    """Facts about a folder of token files."""

    dtype: Literal["uint16", "int32"]
    vocab_size: VocabSize
    eod: Count
    tokens: Positive  # including end-of-document tokens
    documents: Positive
    text_bytes: Count  # of the documents' text as UTF-8; 0 if unknown
    tokenizer_sha256: str
    sources: tuple[SourceFile, ...]
    checksums: dict[str, str]  # of each other file
    special_tokens: SpecialTokens = "text"
    beginning: tuple[Count, ...] = ()
    loss_mask: bool = False
    pairs: bool = False  # documents 2 n and 2 n + 1 are a chosen and a rejected one
    __pydantic_config__: ClassVar[Any] = STRICT

    def write(self, path: Path) -> None:
        known = {name: value for name, value in dataclasses.asdict(self).items() if name != "pairs" or value}
        facts = seal({"format": FORMAT, "version": VERSION, **known})
        path.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "Meta":
        """Read DIRECTORY/meta.json. Raises UserError if it is missing, damaged, or of a version that cannot be read."""
        path = directory / META_FILE
        if not os.path.lexists(path):
            name = shown(directory)
            if not os.path.exists(directory):
                raise UserError(
                    f"{name} does not exist; make token files with `threefold data prepare INPUT --out {name}`"
                )
            raise UserError(
                f"{name} holds no token files (it has no {META_FILE}); give a folder made by `threefold data prepare "
                "INPUT --out FOLDER`, or whole files of another system: PREFIX.bin with PREFIX.idx, PREFIX_ids.npy "
                "with PREFIX_idx.npz, PREFIX_ids.npz, or JSON lines (.jsonl)"
            )
        try:
            facts = read_json(path)
        except UserError as error:
            raise UserError(f"{str(error).rstrip('.')}; {_PREPARE_AGAIN}") from None
        if not isinstance(facts, dict) or facts.pop("format", None) != FORMAT:
            raise UserError(f"{shown(path)} describes no token files; give a folder made by `threefold data prepare`")
        version = facts.pop("version", None)
        if type(version) is not int or version != VERSION:
            raise UserError(
                f"{shown(path)} has version {shown(repr(version))} of the format and this Threefold reads version "
                f"{VERSION}; {_PREPARE_AGAIN}"
            )
        if unseal({"format": FORMAT, "version": version, **facts}) is None:
            raise UserError(damaged(path, _PREPARE_AGAIN))
        del facts["checksum"]
        try:
            meta = parse_facts(cls, facts)
            if any(token >= meta.vocab_size for token in meta.beginning):
                raise WrongFact("beginning", facts)
            if not CHECKED <= meta.checksums.keys() <= CHECKED | CHAT_FILES:
                raise WrongFact("checksums", facts)
            if meta.pairs and (meta.documents % 2 or not meta.loss_mask):
                raise WrongFact("pairs", facts)
        except WrongFact as wrong:
            raise UserError(f"{shown(path)} is damaged ({wrong}); {_PREPARE_AGAIN}") from None
        return meta


def file_checksums(folder: Path) -> dict[str, str]:
    """Compute the checksum of each file of a folder of token files except meta.json, which will hold them."""
    names = sorted(name for name in CHECKED | CHAT_FILES if name in CHECKED or (folder / name).exists())
    return dict(zip(names, checksums(folder / name for name in names), strict=True))


def list_token_files(folder: Path) -> Collection[str] | None:
    """List the file names of a folder of token files, of any version; None if it is not one."""
    try:
        facts = read_json(folder / META_FILE)
    except UserError:
        return None
    return {META_FILE, *CHECKED, *CHAT_FILES} if isinstance(facts, dict) and facts.get("format") == FORMAT else None


_AGAIN: Final = "prepare the data again with `threefold data prepare`"


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenFiles(Corpus):
    """Folder written by `threefold data prepare`, as a corpus. No document is empty, and each text ends with `eod`."""

    meta: Meta
    eod: int
    tokenizer_file: Path

    @classmethod
    def open(cls, path: Path | str) -> "TokenFiles":
        """Open and check a folder. Raises UserError if its files are missing, damaged or contradict each other."""
        path = Path(path)
        meta = Meta.read(path)
        tokens_file, documents_file, mask_file = path / TOKENS_FILE, path / DOCUMENTS_FILE, path / LOSS_MASK_FILE
        _check_size(tokens_file, TOKEN_DTYPES[meta.dtype], meta.tokens)
        _check_size(documents_file, DOCUMENT_DTYPE, meta.documents + 1)
        if meta.loss_mask:
            _check_size(mask_file, "u1", meta.tokens)
        files = cls(
            path=path,
            files=(tokens_file, documents_file),
            meta=meta,
            tokens=StoredArray(tokens_file, TOKEN_DTYPES[meta.dtype], meta.tokens),
            documents=load_column(documents_file, DOCUMENT_DTYPE, meta.documents + 1),
            vocab_size=meta.vocab_size,
            eod=meta.eod,
            tokenizer_file=path / TOKENIZER_FILE,
            remedy=_AGAIN,
            rule=TextRule(meta.special_tokens, meta.beginning),
            loss_mask=StoredArray(mask_file, "u1", meta.tokens) if meta.loss_mask else None,
            template=template_of(None, path / TOKENIZER_FILE) if meta.loss_mask else None,
            holds_pairs=meta.pairs,
            checksums=meta.checksums,
        )
        for file in (documents_file, mask_file) if files.holds_chat else (documents_file,):
            if checksum(file) != meta.checksums.get(file.name):
                raise UserError(damaged(file, _AGAIN))
        starts = files.documents
        if starts[0] != 0 or starts[-1] != meta.tokens or not np.all(np.diff(starts) > 0):
            raise UserError(f"{documents_file} does not fit {TOKENS_FILE}; {_AGAIN}")
        # Only the first and last document: checking every one would read the whole file.
        ends = () if files.holds_chat else (1, -1)  # conversations end as their template ends them
        if any(files.tokens[starts[d] - 1] != meta.eod for d in ends) or not 0 <= meta.eod < meta.vocab_size:
            raise UserError(f"{tokens_file} has a document that does not end with token {meta.eod}; {_AGAIN}")
        if not os.path.lexists(files.tokenizer_file):
            raise UserError(f"{path} has no {TOKENIZER_FILE}; {_AGAIN}")
        require_file(files.tokenizer_file)
        if files.tokenizer_sha256 != meta.tokenizer_sha256:
            raise UserError(f"{files.tokenizer_file} is not the tokenizer that these tokens were made with; {_AGAIN}")
        return files

    def stored(self) -> StoredTokens:
        return StoredTokens(self.path, "Threefold", self.files, self.tokens, self.documents)


def _check_size(path: Path, dtype: str, count: int) -> None:
    if not os.path.lexists(path):
        raise UserError(f"{shown(path)} is missing; {_AGAIN}")
    expected = count * np.dtype(dtype).itemsize
    if (size := require_file(path)) != expected:
        raise UserError(f"{shown(path)} holds {size:,} bytes and {expected:,} were written; {_AGAIN}")

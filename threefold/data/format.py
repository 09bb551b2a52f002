"""What a folder of token files holds, written down once for the writer and the reader.

tokens.bin      every document's tokens back to back, each document ended by the end-of-document token;
                uint16 for a vocabulary below 65,500, else int32, little endian
documents.bin   int64 little endian [documents + 1]: where each document starts in tokens.bin; the last is the end
tokenizer.json  the tokenizer, as the `tokenizers` library stores it
meta.json       `Meta`, below
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from threefold.errors import UserError

FORMAT: Final = "threefold-tokens"
VERSION: Final = 1

META_FILE: Final = "meta.json"
TOKENS_FILE: Final = "tokens.bin"
DOCUMENTS_FILE: Final = "documents.bin"
TOKENIZER_FILE: Final = "tokenizer.json"

DOCUMENT_DTYPE: Final = "<i8"
# The bound of the Fleet token files, kept so that the same vocabulary has the same type in both.
_UINT16_VOCAB: Final = 65_500
DTYPES: Final = {"uint16": "<u2", "int32": "<i4"}


def dtype_for(vocab_size: int) -> str:
    """Name of the type that tokens of this vocabulary are stored in: a key of `DTYPES`."""
    return "uint16" if vocab_size < _UINT16_VOCAB else "int32"


@dataclass(frozen=True)
class Source:
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
    """

    dtype: str
    vocab_size: int
    eod: int
    tokens: int
    documents: int
    text_bytes: int
    tokenizer_sha256: str
    sources: tuple[Source, ...]

    def write(self, path: Path) -> None:
        facts = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        path.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "Meta":
        """Read DIRECTORY/meta.json.

        Raises:
            UserError: there is none, or it is not one this version can read.
        """
        path = directory / META_FILE
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(_no_token_files(directory)) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}); prepare the data again") from None
        if not isinstance(facts, dict) or facts.pop("format", None) != FORMAT:
            raise UserError(f"{path} describes no token files; give a folder made by `threefold data prepare`")
        if (version := facts.pop("version", None)) != VERSION:
            raise UserError(f"{path} has version {version} of the format and this Threefold reads version {VERSION}")
        return cls._from_facts(facts, path)

    @classmethod
    def _from_facts(cls, facts: dict[str, Any], path: Path) -> "Meta":
        try:
            facts["sources"] = tuple(Source(**source) for source in facts["sources"])
            meta = cls(**facts)
        except (KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}); prepare the data again") from None
        counts = (meta.vocab_size, meta.eod, meta.tokens, meta.documents)
        if meta.dtype not in DTYPES or not all(isinstance(count, int) for count in counts):
            raise UserError(f"{path} is damaged (its dtype or a count is not one); prepare the data again")
        return meta


def _no_token_files(directory: Path) -> str:
    if not directory.exists():
        return f"{directory} does not exist; make token files with `threefold data prepare INPUT --out {directory}`"
    return (
        f"{directory} holds no token files (it has no {META_FILE}); "
        "give a folder made by `threefold data prepare INPUT --out FOLDER`, or whole files of another system: "
        "PREFIX.bin with PREFIX.idx, PREFIX_ids.npy with PREFIX_idx.npz, or PREFIX_ids.npz"
    )

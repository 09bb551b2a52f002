"""What a folder of token files holds, written down once for the writer and the reader.

tokens.bin      every document's tokens back to back, each text ended by the end-of-document token;
                uint16 for a vocabulary below 65,500, else int32, little endian
documents.bin   int64 little endian [documents + 1]: where each document starts in tokens.bin; the last is the end
loss_mask.bin   uint8 [tokens], only where there are conversations or prompts: 1 where predicting the token counts for
                the loss; the documents then end as their chat template ends them
tokenizer.json  the tokenizer, as the `tokenizers` library stores it
meta.json       `Meta`, below
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from threefold.data.text import BEFORE_RULES, SpecialTokens, TextRule
from threefold.errors import UserError

FORMAT: Final = "threefold-tokens"
VERSION: Final = 2
READABLE: Final = (1, 2)
"""Version 1 knew neither loss masks nor rules of special tokens, and took all text as text."""

META_FILE: Final = "meta.json"
TOKENS_FILE: Final = "tokens.bin"
DOCUMENTS_FILE: Final = "documents.bin"
LOSS_MASK_FILE: Final = "loss_mask.bin"
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
        special_tokens: what became of text that spells a special token: `parse` or `text`.
        beginning: tokens that each text begins with, before its own.
        loss_mask: whether there is a file that says which tokens count.
    """

    dtype: str
    vocab_size: int
    eod: int
    tokens: int
    documents: int
    text_bytes: int
    tokenizer_sha256: str
    sources: tuple[Source, ...]
    special_tokens: SpecialTokens = BEFORE_RULES.special_tokens
    beginning: tuple[int, ...] = BEFORE_RULES.beginning
    loss_mask: bool = False

    @property
    def rule(self) -> TextRule:
        """How the text became tokens."""
        return TextRule(self.special_tokens, self.beginning)

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
        if (version := facts.pop("version", None)) not in READABLE:
            raise UserError(f"{path} has version {version} of the format and this Threefold reads up to {VERSION}")
        return cls._from_facts(facts, path)

    @classmethod
    def _from_facts(cls, facts: dict[str, Any], path: Path) -> "Meta":
        try:
            facts["sources"] = tuple(Source(**source) for source in facts["sources"])
            facts["beginning"] = tuple(facts.get("beginning", ()))
            meta = cls(**facts)
        except (KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}); prepare the data again") from None
        counts = (meta.vocab_size, meta.eod, meta.tokens, meta.documents, *meta.beginning)
        known = meta.dtype in DTYPES and meta.special_tokens in get_args(SpecialTokens)
        if not known or not all(isinstance(count, int) for count in counts) or not isinstance(meta.loss_mask, bool):
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

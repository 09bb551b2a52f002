"""A corpus, read from any token format: its tokens, the bounds of their documents, their vocabulary."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from threefold.data.chat_template import ChatTemplate
from threefold.data.stored_array import StoredArray
from threefold.data.tokenizer import TextRule
from threefold.errors import UserError
from threefold.files import shown
from threefold.random.permutation import Int64Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer


TokenArray = NDArray[np.integer] | StoredArray
"""Token ids, in memory or read out of a file where they are indexed."""


@dataclass(frozen=True, eq=False)
class StoredTokens:
    """What files of any format hold by themselves, with nothing that has to be known from elsewhere.

    Attributes:
        path: what messages call it.
        format: the format's name.
        files: the files, that of the tokens first.
        tokens: [N] integers, read only; in memory only where the format requires it.
        sequences: int64 [S + 1], where each sequence starts in `tokens`; the last is N. Sequences may be empty.
        document_sequences: int64 [D + 1], the first sequence of each document; the last is S. None where each sequence
            is a document.
        modes: int8 [S], the modes of Megatron-LM's sequences, if there are any.
        notes: a sentence for each thing that a user should know of how these files are read.
    """

    path: Path
    format: str
    files: tuple[Path, ...]
    tokens: TokenArray
    sequences: Int64Array
    document_sequences: Int64Array | None = None
    modes: NDArray[np.int8] | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def documents(self) -> Int64Array:
        """int64 [D + 1], where each document starts in `tokens`; the last is N. Documents may be empty."""
        return self.sequences if self.document_sequences is None else self.sequences[self.document_sequences]


@dataclass(frozen=True, eq=False, kw_only=True)
class Corpus:
    """Tokens to train on, whatever files they are in.

    Attributes:
        path: what messages call it.
        files: the files it was read from, that of the tokens first.
        tokens: [N] integers, read only, usually in a file.
        documents: int64 [D + 1]: document d is tokens[documents[d]:documents[d + 1]], which may be empty.
        vocab_size: number of token ids.
        eod: id of the token that ends a document; None if there is none.
        tokenizer_file: the tokenizer.json of the tokens, if it is known.
        remedy: how to replace a damaged file, as the end of a sentence.
        rule: how its text became tokens.
        loss_mask: uint8 [N], 1 where a token's label is not ignored; None where the corpus is no conversations
            and all count.
        template: of its conversations, if it is known.
        checksums: of its files as they were written, by name, as far as they are kept.
    """

    path: Path
    files: tuple[Path, ...]
    tokens: TokenArray
    documents: NDArray[np.int64]
    vocab_size: int
    eod: int | None
    tokenizer_file: Path | None
    remedy: str
    rule: TextRule
    loss_mask: NDArray[np.uint8] | StoredArray | None = None
    template: ChatTemplate | None = None
    checksums: Mapping[str, str] = field(default_factory=dict)

    @property
    def holds_chat(self) -> bool:
        """Whether its documents are conversations, or prompts and their completions."""
        return self.loss_mask is not None

    @property
    def document_count(self) -> int:
        return len(self.documents) - 1

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    @cached_property
    def tokenizer(self) -> "Tokenizer | None":
        from tokenizers import Tokenizer

        return None if self.tokenizer_file is None else Tokenizer.from_file(str(self.tokenizer_file))

    @cached_property
    def tokenizer_sha256(self) -> str | None:
        """SHA-256 of the tokenizer.json, if it is known."""
        return None if self.tokenizer_file is None else hashlib.sha256(self.tokenizer_file.read_bytes()).hexdigest()

    def check_tokens(self, tokens: NDArray[np.integer], start: int) -> None:
        """Check that a piece of the corpus, which starts at token `start`, is inside its vocabulary.

        Raises:
            UserError: one is not.
        """
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            place = int(np.argmax((tokens < 0) | (tokens >= self.vocab_size)))
            raise self.outside(int(tokens[place]), start + place)

    def document_of(self, place: int) -> int:
        """The number of the document that token `place` belongs to."""
        return int(np.searchsorted(self.documents, place, side="right")) - 1

    def outside(self, token: int, place: int, sample: str = "") -> UserError:
        """The error that token `place` is not in the vocabulary.

        Args:
            token: its id.
            place: its number in the corpus.
            sample: names its sample, with a comma and a space before it.
        """
        return UserError(
            f"{shown(self.files[0])} holds token {token:,} at position {place:,} (document "
            f"{self.document_of(place):,}{sample}), outside the vocabulary of {self.vocab_size:,} tokens; {self.remedy}"
        )

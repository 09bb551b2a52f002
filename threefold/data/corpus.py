"""A corpus, read from any token format: its tokens, the bounds of its documents, and its vocabulary."""

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
from threefold.random import Int64Array

if TYPE_CHECKING:
    from tokenizers import Tokenizer


TokenArray = NDArray[np.integer] | StoredArray
"""Token ids, in memory or in a file that is read on indexing."""


@dataclass(frozen=True, eq=False)
class StoredTokens:
    """Content of token files of any format, without facts that come from elsewhere, such as the vocabulary.

    Attributes:
        path: path shown in messages.
        format: name of the format.
        files: the files, the token file first.
        tokens: [N] integers, read only; in memory only if the format requires it.
        sequences: int64 [S + 1], start of each sequence in `tokens`; the last is N. Sequences may be empty.
        document_sequences: int64 [D + 1], first sequence of each document; the last is S. None if each sequence is a
            document.
        modes: int8 [S], modes of Megatron-LM's sequences, if there are any.
        notes: sentences that a user should know about how these files are read.
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
        """Start of each document in `tokens`, int64 [D + 1]; the last is N. Documents may be empty."""
        return self.sequences if self.document_sequences is None else self.sequences[self.document_sequences]


@dataclass(frozen=True, eq=False, kw_only=True)
class Corpus:
    """Tokens to train on, from files of any format.

    Attributes:
        path: path shown in messages.
        files: the files it was read from, the token file first.
        tokens: [N] integers, read only, usually in a file.
        documents: int64 [D + 1]: document d is tokens[documents[d]:documents[d + 1]], which may be empty.
        vocab_size: number of token ids.
        eod: id of the end-of-document token; None if there is none.
        tokenizer_file: tokenizer.json of the tokens, if it is known.
        remedy: how to replace a damaged file, as the end of a sentence.
        rule: how its text became tokens.
        loss_mask: uint8 [N], 1 where a token counts for the loss; None for plain text, where all count.
        template: chat template of its conversations, if it is known.
        checksums: recorded checksums of its files by name, as far as they are kept.
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
        return None if self.tokenizer_file is None else hashlib.sha256(self.tokenizer_file.read_bytes()).hexdigest()

    def check_tokens(self, tokens: NDArray[np.integer], start: int) -> None:
        """Check tokens that start at position `start`. Raises UserError if one is outside the vocabulary."""
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            place = int(np.argmax((tokens < 0) | (tokens >= self.vocab_size)))
            raise self.outside(int(tokens[place]), start + place)

    def check_samples(self, tokens: Int64Array, places: Int64Array, indices: Int64Array, split: str) -> None:
        """Check the tokens of samples. Raises UserError if one is outside the vocabulary.

        Args:
            tokens, places: int64 [rows, columns], the tokens and their positions in the corpus.
            indices: int64 [rows], number of each row's sample.
            split: name of the split.
        """
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            row, column = np.argwhere((tokens < 0) | (tokens >= self.vocab_size))[0]
            sample = f", sample {indices[row]:,} of the {split} split"
            raise self.outside(int(tokens[row, column]), int(places[row, column]), sample)

    def document_of(self, place: int) -> str:
        """Name the document at a position."""
        return f"document {int(np.searchsorted(self.documents, place, side='right')) - 1:,}"

    def outside(self, token: int, place: int, sample: str = "") -> UserError:
        """Return the error for a token outside the vocabulary.

        Args:
            token: token id.
            place: position in the corpus.
            sample: name of its sample, preceded by a comma and a space.
        """
        return UserError(
            f"{shown(self.files[0])} holds token {token:,} at position {place:,} ({self.document_of(place)}{sample}), "
            f"outside the vocabulary of {self.vocab_size:,} tokens; {self.remedy}"
        )

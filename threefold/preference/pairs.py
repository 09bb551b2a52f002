"""Pairs of a chosen and a rejected answer: their lines of JSON, in TRL's formats, and the samples of a split."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np

from threefold.data.conversations import CHOSEN, COMPLETION, MESSAGES, PROMPT, REJECTED, Chat, Completion
from threefold.data.corpus import Corpus
from threefold.data.samples import document_numbers
from threefold.errors import UserError
from threefold.huggingface.conversations import chat_of
from threefold.huggingface.packed_conversations import PackedConversations
from threefold.random import Float64Array, Int64Array

Answer = Chat | Completion


def preference_of(value: dict[str, Any], where: str) -> tuple[Answer, Answer]:
    """Parse the chosen and the rejected document of a line. Raises UserError if it is malformed.

    Answers are texts after the text `prompt`, or messages after the messages `prompt`. Without messages in `prompt`,
    they begin with the same messages, after which they are compared.
    """
    prompt, chosen, rejected = value.get(PROMPT), value[CHOSEN], value[REJECTED]
    if isinstance(chosen, list) and isinstance(rejected, list) and not isinstance(prompt, list):
        shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if not chosen or not rejected:
            raise UserError(f"{where} has chosen messages that are the rejected ones; leave the line out.")
    if prompt is None:
        raise UserError(f"{where} has chosen and rejected texts without a prompt; give the prompt they answer.")
    answers = ((CHOSEN, chosen), (REJECTED, rejected))
    lines = ((name, {PROMPT: prompt, COMPLETION: answer, "tools": value.get("tools")}) for name, answer in answers)
    one, other = (chat_of(line, MESSAGES, f"{where} ({name})") for name, line in lines)
    return one, other


@dataclass(frozen=True, eq=False)
class PreferencePairs(PackedConversations):
    """Samples of one split of a corpus of pairs: each has the chosen document, the rejected one, and padding.

    A pair of more than S + 1 tokens is left out.
    """

    known: Float64Array | None = None  # [samples, 2], reference log-probabilities of the chosen and the rejected one

    @classmethod
    def open(
        cls, corpus: Corpus, name: str, split: str, sequence_length: int, counts_all: bool = False
    ) -> "PreferencePairs":
        """Open the samples of a split, as in `PackedSamples.open`."""
        numbers = document_numbers(corpus.document_count // 2, split, name)
        if not len(numbers):
            raise UserError(f'data.split "{split}" gives the {name} split no pairs; give it a weight above 0')
        first = corpus.documents[2 * numbers]
        whole = corpus.documents[2 * numbers + 2] - first
        kept = whole <= sequence_length + 1
        if not kept.any():
            raise UserError(
                f"data.sequence_length is {sequence_length} but the shortest pair of the {name} split has "
                f"{whole.min():,} tokens, of its chosen and its rejected document together; use {whole.min() - 1} at "
                "least."
            )
        places = (2 * numbers[kept, None] + np.arange(2)).ravel()
        starts, ends = corpus.documents[places], corpus.documents[places + 1]
        samples = np.arange(0, len(places) + 1, 2)
        read, longer = len(numbers), int((~kept).sum())
        return cls(corpus, sequence_length, counts_all, starts, ends - starts, samples, read, longer)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        if not self.longer:
            return ()
        return (
            f"{self.longer:,} of {self.documents_read:,} pairs are left out, as their two documents together have "
            f"more than data.sequence_length {self.sequence_length:,} + 1 tokens.",
        )

    def with_references(self, known: Float64Array) -> "PreferencePairs":
        """Return the samples with their reference log-probabilities, [samples, 2]."""
        return replace(self, known=known)

    def references(self, indices: Int64Array) -> Float64Array | None:
        return None if self.known is None else self.known[indices]

"""Samples of one split of a corpus of conversations, packed whole."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from threefold.constants import IGNORE_INDEX
from threefold.data.corpus import Corpus
from threefold.data.packed import ends_document
from threefold.data.samples import Samples, document_numbers
from threefold.errors import UserError
from threefold.random import Int64Array


@dataclass(frozen=True, eq=False)
class PackedConversations(Samples):
    """Samples of one split of a corpus with a loss mask.

    A sample has room for S + 1 tokens, the last of which is only a label. Documents are packed whole, the longest
    first, each into the fullest sample that has room for it (best-fit decreasing; Ding et al., arXiv 2404.10830). The
    rest of a sample is padding, with ignored labels. No label crosses from one document to the next.

    A document of more than S + 1 tokens is cut into segments of S + 1, each beginning with the last token of the one
    before. So every token of the loss mask is a label exactly once, other than one after an end of document; a segment
    without any is left out.
    """

    corpus: Corpus
    sequence_length: int  # S, in tokens
    counts_all: bool  # all tokens have labels, instead of only those of the loss mask
    starts: Int64Array  # [segments], position of each in the tokens; ordered by sample
    lengths: Int64Array  # [segments]
    samples: Int64Array  # [samples + 1], first segment of each
    documents_read: int
    longer: int  # documents longer than a sample

    @classmethod
    def open(
        cls, corpus: Corpus, name: str, split: str, sequence_length: int, counts_all: bool = False
    ) -> "PackedConversations":
        """Open the samples of a split, as in `PackedSamples.open`."""
        numbers = document_numbers(corpus.document_count, split, name)
        if not len(numbers):
            raise UserError(f'data.split "{split}" gives the {name} split no conversations; give it a weight above 0')
        starts, ends = corpus.documents[numbers], corpus.documents[numbers + 1]
        segments = np.maximum(1, -(-(ends - starts - 1) // sequence_length))
        place = np.arange(segments.sum()) - np.repeat(np.cumsum(segments) - segments, segments)
        segment_starts = np.repeat(starts, segments) + place * sequence_length
        lengths = np.minimum(np.repeat(ends, segments) - segment_starts, sequence_length + 1)
        cut = np.flatnonzero(np.repeat(segments > 1, segments))
        kept = lengths > 1
        if corpus.loss_mask is not None and not counts_all:
            for segment in cut.tolist():
                first, last = int(segment_starts[segment]), int(segment_starts[segment] + lengths[segment]) - 1
                has_label = ~ends_document(corpus.tokens[first:last], corpus.eod)
                kept[segment] = corpus.loss_mask[first + 1 : last + 1][has_label].any()
        if not kept.any():
            raise UserError(f"{corpus.path} has no token that counts in its {name} split; give other data.")
        segment_starts, lengths = segment_starts[kept], lengths[kept]
        chosen = pack(lengths, sequence_length + 1)
        order = np.argsort(chosen, kind="stable")
        samples = np.searchsorted(chosen[order], np.arange(int(chosen.max()) + 2))
        longer = int((segments > 1).sum())
        return cls(
            corpus, sequence_length, counts_all, segment_starts[order], lengths[order], samples, len(numbers), longer
        )

    def __len__(self) -> int:
        return len(self.samples) - 1

    @cached_property
    def notes(self) -> tuple[str, ...]:
        room = len(self) * (self.sequence_length + 1)
        packed = (
            f"{self.documents_read:,} conversations are packed into {len(self):,} samples, which are "
            f"{self.lengths.sum() / room:.0%} full."
        )
        cut = (
            f"{self.longer:,} of them are longer than a sample of {self.sequence_length:,} tokens: they are cut into "
            "pieces, all of whose answers have labels; the attention mask separates pieces."
        )
        return (packed, cut) if self.longer else (packed,)

    def labelled(self, indices: Int64Array, keys: Int64Array | None = None) -> tuple[Int64Array, Int64Array]:
        shape = (len(indices), self.sequence_length + 1)
        windows, counted = np.full(shape, self.corpus.eod or 0, np.int64), np.zeros(shape, np.bool_)
        for row, index in enumerate(indices.tolist()):
            end = 0
            for start, length in self._segments(index):
                here = slice(end, end + length)
                windows[row, here] = tokens = self.corpus.tokens[start : start + length]
                self.corpus.check_tokens(tokens, start)
                if self.counts_all or self.corpus.loss_mask is None:
                    counted[row, here] = True
                else:
                    counted[row, here] = self.corpus.loss_mask[start : start + length] != 0
                counted[row, end] = False  # preceded by another document, or by nothing
                end += length
        tokens = windows[:, :-1]
        has_label = counted[:, 1:] & ~ends_document(tokens, self.corpus.eod)
        return tokens, np.where(has_label, windows[:, 1:], IGNORE_INDEX)

    def documents(self, indices: Int64Array) -> Int64Array:
        """Return the index of each input token's segment in its sample; padding has the next index."""
        found = np.zeros((len(indices), self.sequence_length), np.int64)
        for row, index in enumerate(indices.tolist()):
            ends = np.cumsum([length for _, length in self._segments(index)])
            found[row] = np.searchsorted(ends, np.arange(self.sequence_length), side="right")
        return found

    def positions(self, indices: Int64Array) -> Int64Array:
        documents, places = self.documents(indices), np.arange(self.sequence_length)
        begins = np.diff(documents, axis=1, prepend=-1) != 0
        return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)

    def padding(self, indices: Int64Array) -> Int64Array:
        held = [sum(length for _, length in self._segments(index)) for index in indices.tolist()]
        return np.maximum(0, self.sequence_length - np.array(held, np.int64))

    def _segments(self, sample: int) -> list[tuple[int, int]]:
        here = slice(self.samples[sample], self.samples[sample + 1])
        return list(zip(self.starts[here].tolist(), self.lengths[here].tolist(), strict=True))


def pack(lengths: Int64Array, room: int) -> Int64Array:
    """Assign each segment to a bin by best-fit decreasing: int64 [segments], bin numbers from 0 without gaps.

    No length exceeds `room`. The bits of one integer mark which amounts of free room occur among the bins, so the best
    fit is found at once.
    """
    bins = np.empty(len(lengths), np.int64)
    by_room: dict[int, list[int]] = {}
    rooms = count = 0
    for segment in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[segment])
        if fitting := rooms >> length:
            free = length + (fitting & -fitting).bit_length() - 1
            chosen = by_room[free].pop()
            if not by_room[free]:
                rooms &= ~(1 << free)
        else:
            free, chosen, count = room, count, count + 1
        bins[segment] = chosen
        if left := free - length:
            by_room.setdefault(left, []).append(chosen)
            rooms |= 1 << left
    return bins

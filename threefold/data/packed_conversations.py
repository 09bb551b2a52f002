"""Packed conversations: best-fit-decreasing packing of whole conversations into samples."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from threefold.data.corpus import Corpus
from threefold.data.samples import SingleCorpus
from threefold.data.split import document_runs
from threefold.errors import UserError
from threefold.labels import IGNORE_INDEX
from threefold.random.permutation import Int64Array


@dataclass(frozen=True, eq=False)
class PackedConversations(SingleCorpus):
    """The samples of one split of a corpus with a loss mask.

    A sample has room for S + 1 tokens, the last of which is only a label. Documents are put into samples whole, the
    longest first, each into the fullest sample that has room for it (best-fit decreasing; Ding et al., arXiv
    2404.10830). The rest of a sample is padding, with ignored labels. No label crosses from one document to
    the next.

    A document of more than S + 1 tokens is cut into pieces of S + 1, each of which begins with the last token of the
    one before it, so that every token of the loss mask is a label exactly once; a piece without any is left out.

    Attributes:
        corpus: where the tokens and their mask are.
        sequence_length: S, in tokens.
        counts_all: whether all tokens have labels in place of those of the loss mask.
        starts, lengths: int64 [pieces], the position of each piece in the tokens; ordered by sample.
        samples: int64 [samples + 1], the first piece of each sample.
        documents_read: documents of the split.
        longer: how many of them are longer than a sample.
    """

    corpus: Corpus
    sequence_length: int
    counts_all: bool
    starts: Int64Array
    lengths: Int64Array
    samples: Int64Array
    documents_read: int
    longer: int

    @classmethod
    def open(
        cls, corpus: Corpus, name: str, split: str, sequence_length: int, counts_all: bool = False
    ) -> "PackedConversations":
        """The samples of split `name` ("train", "valid" or "test") under `split`, such as "949,50,1".

        Raises:
            UserError: the split is empty, or `split` is malformed.
        """
        runs = document_runs(corpus.document_count, split, name)
        if not len(runs):
            raise UserError(f'data.split "{split}" gives the {name} split no conversations; give it a weight above 0')
        numbers = np.concatenate([np.arange(first, end) for first, end in runs])
        starts, ends = corpus.documents[numbers], corpus.documents[numbers + 1]
        pieces = np.maximum(1, -(-(ends - starts - 1) // sequence_length))
        place = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        piece_starts = np.repeat(starts, pieces) + place * sequence_length
        lengths = np.minimum(np.repeat(ends, pieces) - piece_starts, sequence_length + 1)
        cut = np.flatnonzero(np.repeat(pieces > 1, pieces))
        kept = lengths > 1
        if corpus.loss_mask is not None and not counts_all:
            for piece in cut.tolist():
                first = int(piece_starts[piece])
                kept[piece] = corpus.loss_mask[first + 1 : first + int(lengths[piece])].any()
        if not kept.any():
            raise UserError(f"{corpus.path} has no token that counts in its {name} split; give other data.")
        piece_starts, lengths = piece_starts[kept], lengths[kept]
        chosen = pack(lengths, sequence_length + 1)
        order = np.argsort(chosen, kind="stable")
        samples = np.searchsorted(chosen[order], np.arange(int(chosen.max()) + 2))
        longer = int((pieces > 1).sum())
        return cls(
            corpus, sequence_length, counts_all, piece_starts[order], lengths[order], samples, len(numbers), longer
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
        if not self.longer:
            return (packed,)
        return (
            packed,
            f"{self.longer:,} of them are longer than a sample of {self.sequence_length:,} tokens: they are cut into "
            "pieces, all of whose answers have labels; the attention mask separates pieces.",
        )

    def labelled(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        shape = (len(indices), self.sequence_length + 1)
        windows, counted = np.full(shape, self.corpus.eod or 0, np.int64), np.zeros(shape, np.bool_)
        for row, index in enumerate(indices.tolist()):
            end = 0
            for start, length in self._pieces(index):
                here = slice(end, end + length)
                windows[row, here] = tokens = self.corpus.tokens[start : start + length]
                self.corpus.check_tokens(tokens, start)
                counted[row, here] = self._counted(start, length)
                counted[row, end] = False  # what is before it is another document, or nothing
                end += length
        return windows[:, :-1], np.where(counted[:, 1:], windows[:, 1:], IGNORE_INDEX)

    def documents(self, indices: Int64Array) -> Int64Array:
        """The number of the piece in its sample that each input token belongs to; the fill is one more."""
        found = np.zeros((len(indices), self.sequence_length), np.int64)
        for row, index in enumerate(indices.tolist()):
            lengths = [length for _, length in self._pieces(index)]
            bounds = np.cumsum(lengths)
            found[row] = np.searchsorted(bounds, np.arange(self.sequence_length), side="right")
        return found

    def positions(self, indices: Int64Array) -> Int64Array:
        documents, places = self.documents(indices), np.arange(self.sequence_length)
        begins = np.diff(documents, axis=1, prepend=-1) != 0
        return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)

    def padding(self, indices: Int64Array) -> Int64Array:
        return np.maximum(0, self.sequence_length - self._held[indices])

    @cached_property
    def _held(self) -> Int64Array:
        """int64 [samples], tokens of the pieces of each sample."""
        return np.add.reduceat(self.lengths, self.samples[:-1])

    def _pieces(self, sample: int) -> list[tuple[int, int]]:
        here = slice(self.samples[sample], self.samples[sample + 1])
        return list(zip(self.starts[here].tolist(), self.lengths[here].tolist(), strict=True))

    def _counted(self, start: int, length: int) -> NDArray[np.bool_]:
        if self.counts_all or self.corpus.loss_mask is None:
            return np.ones(length, np.bool_)
        return self.corpus.loss_mask[start : start + length] != 0


def pack(lengths: Int64Array, room: int) -> Int64Array:
    """The bin of each piece: best-fit decreasing. The free room of all bins is one number's bits, so the best is found
    at once.

    Args:
        lengths: int64 [pieces], each at most `room`.
        room: of a bin.

    Returns:
        int64 [pieces], numbers from 0 without gaps.
    """
    bins = np.empty(len(lengths), np.int64)
    by_room: dict[int, list[int]] = {}
    rooms = count = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        if fitting := rooms >> length:
            free = length + (fitting & -fitting).bit_length() - 1
            chosen = by_room[free].pop()
            if not by_room[free]:
                rooms &= ~(1 << free)
        else:
            free, chosen, count = room, count, count + 1
        bins[piece] = chosen
        if left := free - length:
            by_room.setdefault(left, []).append(chosen)
            rooms |= 1 << left
    return bins

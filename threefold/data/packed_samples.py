"""Packed samples: the documents of a split as one stream of tokens, cut into samples of equal length."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from threefold.data.corpus import Corpus
from threefold.data.samples import SingleCorpus
from threefold.data.split import SPLITS, document_runs
from threefold.errors import UserError
from threefold.labels import IGNORE_INDEX
from threefold.random.permutation import Int64Array


@dataclass(frozen=True, eq=False)
class PackedSamples(SingleCorpus):
    """The samples of one split: its documents end to end in file order, cut every `sequence_length` tokens.

    Sample i is stream[i * S : i * S + S + 1]: it overlaps the next by one token, so that each token of the stream but
    the first is a label exactly once. What is left at the end and does not fill a sample is not used.

    Attributes:
        files: where the tokens are.
        name: the split.
        sequence_length: S, in tokens.
        stream_starts: int64 [runs], where each run of neighbouring documents starts in the stream.
        shifts: int64 [runs], what to add to a place in the stream to get its place in `files.tokens`.
        tokens: length of the stream.
    """

    files: Corpus
    name: str
    sequence_length: int
    stream_starts: Int64Array
    shifts: Int64Array
    tokens: int

    @classmethod
    def open(cls, files: Corpus, name: str, split: str, sequence_length: int) -> "PackedSamples":
        """The samples of split `name` ("train", "valid" or "test") under `split`, such as "949,50,1".

        Raises:
            UserError: the split is empty or shorter than one sample, or `split` is malformed.
        """
        runs = document_runs(files.document_count, split, name)
        if not len(runs):
            remedy = "give it a weight above 0" if files.document_count > 1 else "prepare more documents"
            unevaluated = ", or set train.eval_every to 0" if name == "valid" else ""
            raise UserError(f'data.split "{split}" gives the {name} split no documents; {remedy}{unevaluated}')
        bounds = np.asarray(files.documents[runs])
        ends = np.cumsum(bounds[:, 1] - bounds[:, 0])
        stream_starts = ends - (bounds[:, 1] - bounds[:, 0])
        samples = cls(files, name, sequence_length, stream_starts, bounds[:, 0] - stream_starts, int(ends[-1]))
        samples._check_length(split)
        return samples

    def __len__(self) -> int:
        return max(0, self.tokens - 1) // self.sequence_length

    def read(self, indices: Int64Array) -> NDArray[np.int64]:
        """Samples at `indices` (int64 [rows]): int64 [rows, S + 1].

        Raises:
            UserError: a token is outside the vocabulary, so the file is damaged.
        """
        places = self._places(indices, self.sequence_length + 1)
        windows: Int64Array = self.files.tokens[places].astype(np.int64)
        if windows.size and not 0 <= windows.min() <= windows.max() < self.files.vocab_size:
            row, column = np.argwhere((windows < 0) | (windows >= self.files.vocab_size))[0]
            sample = f", sample {indices[row]:,} of the {self.name} split"
            raise self.files.outside(int(windows[row, column]), int(places[row, column]), sample)
        return windows

    def labelled(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        windows = self.read(indices)
        tokens, labels = windows[:, :-1], windows[:, 1:].copy()
        # After the end of a document the next token belongs to another one, which nothing here could predict.
        labels[self._ends(indices, tokens)] = IGNORE_INDEX
        return tokens, labels

    def documents(self, indices: Int64Array) -> Int64Array:
        """The number of the document that each input token of the samples at `indices` belongs to: int64 [rows, S]."""
        places = self._places(indices, self.sequence_length)
        return np.searchsorted(self.files.documents, places, side="right") - 1

    def padding(self, indices: Int64Array) -> Int64Array:
        return np.zeros(len(indices), np.int64)

    def ends(self, indices: Int64Array) -> NDArray[np.bool_]:
        """Whether each input token of the samples at `indices` ends its document: bool [rows, S].

        That is the end-of-document token anywhere; without one, the last token of each document.
        """
        return self._ends(indices, self.read(indices)[:, :-1])

    def _ends(self, indices: Int64Array, tokens: Int64Array) -> NDArray[np.bool_]:
        if self.files.eod is not None:
            return tokens == self.files.eod
        places = self._places(indices, self.sequence_length)
        following = np.searchsorted(self.files.documents, places + 1)
        return self.files.documents[following] == places + 1

    def _places(self, indices: Int64Array, length: int) -> Int64Array:
        """The positions of the first `length` tokens of the samples in `files.tokens`: int64 [rows, length]."""
        places = indices[:, None] * self.sequence_length + np.arange(length)
        runs = np.searchsorted(self.stream_starts, places, side="right") - 1
        return places + self.shifts[runs]

    def _check_length(self, split: str) -> None:
        if self.sequence_length < 1:
            raise UserError(f"data.sequence_length is {self.sequence_length} but must be at least 1")
        if len(self):
            return
        rule = (
            f"data.sequence_length is {self.sequence_length} and one sample takes one token more, but the {self.name} "
            f'split of {self.files.path} (data.split "{split}") holds {self.tokens} tokens'
        )
        if self.tokens < 2:
            raise UserError(f"{rule}; prepare more text or give the {self.name} split a larger weight")
        raise UserError(f"{rule}; the largest data.sequence_length that works is {self.tokens - 1}")


@dataclass(frozen=True)
class SplitFacts:
    """How much a split holds: documents, tokens, and samples of the given sequence length."""

    name: str
    documents: int
    tokens: int
    samples: int


def split_facts(files: Corpus, split: str, sequence_length: int) -> list[SplitFacts]:
    """What each split of `files` holds under `split`, also where that is nothing.

    Raises:
        UserError: `split` is malformed, or there are too few documents for it.
    """
    facts = []
    for name in SPLITS:
        runs = document_runs(files.document_count, split, name)
        bounds = files.documents[runs]
        documents, tokens = int(np.diff(runs).sum()), int(np.diff(bounds).sum())
        facts.append(SplitFacts(name, documents, tokens, max(0, tokens - 1) // sequence_length))
    return facts

"""Samples of JSON lines: each line cut or padded to one length."""

from dataclasses import dataclass

import numpy as np

from threefold.data.formats.jsonl import EncodedLines
from threefold.data.samples import SingleCorpus
from threefold.data.split import document_runs
from threefold.data.token_storage import TOKENS_FILE
from threefold.errors import UserError
from threefold.files import shown
from threefold.labels import IGNORE_INDEX
from threefold.random.permutation import Int64Array


@dataclass(frozen=True, eq=False)
class PaddedSamples(SingleCorpus):
    """The samples of one split: one for each of its lines, in file order.

    A sample is the line's tokens and the end-of-document token, cut to S + 1; what a shorter one lacks is filled up
    with end-of-document tokens whose labels are ignored. Attention is causal, so they change nothing before them.

    Attributes:
        encoded: where the tokens are.
        sequence_length: S, in tokens.
        first_samples: int64 [runs], the sample that each run of neighbouring lines starts with.
        shifts: int64 [runs], what to add to a sample's number to get its line's.
        count: number of samples.
        name: the split.
    """

    encoded: EncodedLines
    sequence_length: int
    first_samples: Int64Array
    shifts: Int64Array
    count: int
    name: str

    @classmethod
    def open(cls, encoded: EncodedLines, name: str, split: str, sequence_length: int) -> "PaddedSamples":
        """The samples of split `name` ("train", "valid" or "test") under `split`, such as "949,50,1".

        Args:
            encoded: made for this length.

        Raises:
            UserError: the split is empty, or `split` is malformed.
        """
        runs = document_runs(len(encoded.lines) - 1, split, name)
        if not len(runs):
            raise UserError(f'data.split "{split}" gives the {name} split no lines; give it a weight above 0')
        lengths = runs[:, 1] - runs[:, 0]
        first_samples = np.cumsum(lengths) - lengths
        return cls(encoded, sequence_length, first_samples, runs[:, 0] - first_samples, int(lengths.sum()), name)

    def __len__(self) -> int:
        return self.count

    def labelled(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        lines = self._lines(indices)
        starts, ends = self.encoded.lines[lines], self.encoded.lines[lines + 1]
        places = starts[:, None] + np.arange(self.sequence_length + 1)
        held = places < ends[:, None]
        windows = np.full(places.shape, self.encoded.source.eod, dtype=np.int64)
        windows[held] = self.encoded.tokens[places[held]]
        vocab_size = self.encoded.source.vocab_size
        if windows.size and not 0 <= windows.min() <= windows.max() < vocab_size:
            row, column = np.argwhere((windows < 0) | (windows >= vocab_size))[0]
            raise UserError(
                f"{shown(self.encoded.folder / TOKENS_FILE)} holds token {windows[row, column]:,} at position "
                f"{places[row, column]:,} (line {lines[row]:,} with text, sample {indices[row]:,} of the "
                f"{self.name} split), outside the vocabulary of {vocab_size:,} tokens; delete that folder, which is a "
                "cache."
            )
        return windows[:, :-1], np.where(held[:, 1:], windows[:, 1:], IGNORE_INDEX)

    def documents(self, indices: Int64Array) -> Int64Array:
        return np.repeat(self._lines(indices)[:, None], self.sequence_length, axis=1)

    def padding(self, indices: Int64Array) -> Int64Array:
        lines = self._lines(indices)
        held = self.encoded.lines[lines + 1] - self.encoded.lines[lines]
        return np.maximum(0, self.sequence_length - held)

    def _lines(self, indices: Int64Array) -> Int64Array:
        return indices + self.shifts[np.searchsorted(self.first_samples, indices, side="right") - 1]

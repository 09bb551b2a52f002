"""Samples of one split of a corpus: packed documents, and padded lines."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from threefold.constants import IGNORE_INDEX
from threefold.data.corpus import Corpus
from threefold.data.samples import Samples, token_runs
from threefold.errors import UserError
from threefold.random import Int64Array


def ends_document(tokens: NDArray[np.integer], eod: int | None) -> NDArray[np.bool_]:
    """Return whether each input token is the end-of-document token, whose label never counts, also within a text.

    The token after it cannot be predicted from the tokens before. Samples of every class follow this rule.
    """
    return np.zeros(tokens.shape, np.bool_) if eod is None else tokens == eod


@dataclass(frozen=True, eq=False)
class PackedSamples(Samples):
    """Samples of one split: its documents concatenated in file order, cut every `sequence_length` (S) tokens.

    Sample i is stream[i * S : i * S + S + 1]: it overlaps the next by one token, so that each token of the stream
    except the first is a label exactly once. A remainder that does not fill a sample is not used. `runs` is the stream,
    as positions in `files.tokens`.
    """

    files: Corpus
    name: str
    sequence_length: int
    runs: "Runs"

    @classmethod
    def open(cls, files: Corpus, name: str, split: str, sequence_length: int) -> "PackedSamples":
        """Open the samples of split `name` ("train", "valid" or "test") under `split`, such as "949,50,1"."""
        runs = token_runs(files.documents, split, name)
        if not len(runs):
            remedy = "give it a weight above 0" if files.document_count > 1 else "prepare more documents"
            unevaluated = ", or set train.eval_every to 0" if name == "valid" else ""
            raise UserError(f'data.split "{split}" gives the {name} split no documents; {remedy}{unevaluated}')
        if sequence_length < 1:
            raise UserError(f"data.sequence_length is {sequence_length} but must be at least 1")
        samples = cls(files, name, sequence_length, Runs(runs))
        if not len(samples):
            tokens = samples.runs.length
            rule = (
                f"data.sequence_length is {sequence_length} and one sample takes one token more, but the {name} "
                f'split of {files.path} (data.split "{split}") holds {tokens} tokens'
            )
            if tokens < 2:
                raise UserError(f"{rule}; prepare more text or give the {name} split a larger weight")
            raise UserError(f"{rule}; the largest data.sequence_length that works is {tokens - 1}")
        return samples

    def __len__(self) -> int:
        return max(0, self.runs.length - 1) // self.sequence_length

    def cut(self, ratio: int) -> "PackedSamples":
        return replace(self, sequence_length=self.sequence_length // ratio)

    def read(self, indices: Int64Array) -> NDArray[np.int64]:
        """Read samples: int64 [rows] → int64 [rows, S + 1]. Raises UserError if a token is outside the vocabulary."""
        places = self._places(indices, self.sequence_length + 1)
        windows: Int64Array = self.files.tokens[places].astype(np.int64)
        self.files.check_samples(windows, places, indices, self.name)
        return windows

    def labelled(self, indices: Int64Array, keys: Int64Array | None = None) -> tuple[Int64Array, Int64Array]:
        windows = self.read(indices)
        tokens, labels = windows[:, :-1], windows[:, 1:].copy()
        labels[self._ends(indices, tokens)] = IGNORE_INDEX
        return tokens, labels

    def documents(self, indices: Int64Array) -> Int64Array:
        """Return the document of each input token of the samples at `indices`: int64 [rows, S]."""
        places = self._places(indices, self.sequence_length)
        return np.searchsorted(self.files.documents, places, side="right") - 1

    def _ends(self, indices: Int64Array, tokens: Int64Array) -> NDArray[np.bool_]:
        """Return whether each input token ends its document, by the end-of-document token if there is one."""
        if self.files.eod is not None:
            return ends_document(tokens, self.files.eod)
        places = self._places(indices, self.sequence_length)
        following = np.searchsorted(self.files.documents, places + 1)
        return self.files.documents[following] == places + 1

    def _places(self, indices: Int64Array, length: int) -> Int64Array:
        """Return the positions of the samples' first `length` tokens in `files.tokens`: int64 [rows, length]."""
        return self.runs(indices[:, None] * self.sequence_length + np.arange(length))


class Runs:
    """Map from positions in a stream of runs of numbers, int64 [runs, 2] from first to end, to the numbers."""

    def __init__(self, bounds: Int64Array) -> None:
        lengths = bounds[:, 1] - bounds[:, 0]
        self.length = int(lengths.sum())
        self._starts = np.cumsum(lengths) - lengths
        self._shifts = bounds[:, 0] - self._starts

    def __call__(self, places: Int64Array) -> Int64Array:
        return places + self._shifts[np.searchsorted(self._starts, places, side="right") - 1]

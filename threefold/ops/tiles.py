"""Which parts of an attention matrix hold anything: tiles of queries and keys, of a sliding window and of documents.

Whatever a tile leaves out is hidden, so that work and memory follow what is attended to: S · window, or the sum of the
documents' squared lengths, and not S². Nothing here computes; `ops.attention` does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ids: TypeAlias = npt.NDArray[np.int64]

_LONGEST_QUERIES: Final = 256
"""Queries of a tile that a window bounds, or keys before its first query: with more of them a larger part of the tile
is hidden, with fewer a call computes too little."""
_SHORTEST_QUERIES: Final = 64
"""Queries up to which neighbouring documents share a tile, and fewest of a tile of a small window."""


class Sight(NamedTuple):
    """What hides keys, beside that they come later.

    Attributes:
        window: how many positions back, its own among them, a token attends to; 0 for all.
        documents: int64 [B, n], the document of each position from the first on, which a token does not attend out of;
            None for no documents. On the host, wherever the model is: nothing waits for a device to know the bounds.
    """

    window: int = 0
    documents: Tensor | None = None

    def within(self, keys: int) -> "Sight":
        """The same for a sequence of so many positions, without a window that is no smaller."""
        return Sight(self.window if self.window < keys else 0, self.documents)

    @property
    def hides_nothing(self) -> bool:
        """Whether nothing but what comes later is hidden."""
        return not self.window and self.documents is None


ALL_BEFORE: Final = Sight()
"""Nothing but what comes later is hidden."""


@dataclass(frozen=True)
class Tile:
    """Some queries, and every key that any of them attends to.

    Attributes:
        rows: the samples, which are alike.
        queries, keys: positions in the sequence.
        window: as of `Sight`.
        ids: int64, the document of each position of the sequence, where the tile has several; else None.
    """

    rows: slice
    queries: range
    keys: range
    window: int
    ids: Ids | None = None

    @property
    def crosses_window(self) -> bool:
        """Whether some key is too far back for some query."""
        return 0 < self.window <= self.queries.stop - 1 - self.keys.start

    @property
    def is_causal(self) -> bool:
        """Whether it hides what comes later and nothing else, of as many keys as queries."""
        return self.queries == self.keys and not self.crosses_window and self.ids is None

    @property
    def is_full(self) -> bool:
        """Whether it hides nothing."""
        return self.keys.stop - 1 <= self.queries.start and not self.crosses_window and self.ids is None

    def hidden(self, device: torch.device) -> Tensor:
        """bool [queries, keys]: which keys a query does not attend to."""
        query = torch.arange(self.queries.start, self.queries.stop, device=device).unsqueeze(1)
        key = torch.arange(self.keys.start, self.keys.stop, device=device)
        hidden = key > query
        if self.crosses_window:
            hidden |= key <= query - self.window
        if self.ids is not None:
            ids = torch.from_numpy(self.ids)
            apart = ids[self.queries.start : self.queries.stop, None] != ids[self.keys.start : self.keys.stop]
            hidden |= apart.to(device)
        return hidden

    @property
    def shape(self) -> tuple[int, int, int]:
        """Equal for tiles of one sight that hide alike, where `ids` is None."""
        return len(self.queries), len(self.keys), self.queries.start - self.keys.start


def tiles(rows: int, queries: range, keys: range, sight: Sight, longest: int | None = None) -> Iterator[Tile]:
    """Tiles that together hold every pair of a query and a key that it attends to, each once.

    Args:
        rows: B.
        queries, keys: positions of the sequence that are at hand.
        sight: what hides keys.
        longest: most queries of a tile that is causal alone; None for no limit, as fused kernels skip what comes later.
    """
    if sight.documents is None:
        whole = np.array([0, max(queries.stop, keys.stop)])
        yield from _of_rows(slice(0, rows), _Runs(whole), queries, keys, sight.window, longest)
        return
    documents = sight.documents.numpy(force=True)
    row = 0
    while row < rows:
        end = row + 1
        while end < rows and np.array_equal(documents[end], documents[row]):
            end += 1
        yield from _of_rows(slice(row, end), _runs(documents[row]), queries, keys, sight.window, longest)
        row = end


def document_bounds(rows: int, keys: int, documents: Tensor | None) -> Iterator[list[int] | None]:
    """Of each sample, where the documents of its first `keys` positions begin, and `keys`; None where the parts of a
    document lie apart.

    Args:
        rows: B.
        keys: K.
        documents: as of `Sight`.
    """
    for row in range(rows):
        runs = _Runs(np.array([0, keys])) if documents is None else _runs(documents[row, :keys].numpy(force=True))
        yield None if runs.mixed else runs.bounds.tolist()


class _Runs(NamedTuple):
    """The documents of a sample.

    Attributes:
        bounds: where each run of positions begins, and where the last ends; no token attends out of its run.
        ids: of the positions; None for one document.
        mixed: numbers of the runs that several documents share.
    """

    bounds: Ids
    ids: Ids | None = None
    mixed: frozenset[int] = frozenset()


def _runs(ids: Ids) -> _Runs:
    """The runs of a sample: its documents, but where the parts of one lie apart, those with what is between."""
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(ids)) + 1, [len(ids)]])
    if (np.diff(ids) >= 0).all():
        return _Runs(bounds, ids)
    _, number = np.unique(ids, return_inverse=True)
    places, last = np.arange(len(ids)), np.zeros(len(ids), np.int64)
    np.maximum.at(last, number, places)
    closed = np.flatnonzero(np.maximum.accumulate(last[number]) == places) + 1  # nothing before occurs after
    bounds = np.concatenate([[0], closed])
    mixed = (run for run, (begin, end) in enumerate(pairwise(bounds)) if (ids[begin:end] != ids[begin]).any())
    return _Runs(bounds, ids, frozenset(mixed))


def _of_rows(rows: slice, runs: _Runs, queries: range, keys: range, window: int, longest: int | None) -> Iterator[Tile]:
    bounds = runs.bounds
    most = min(_LONGEST_QUERIES, max(_SHORTEST_QUERIES, window or _LONGEST_QUERIES))
    place = queries.start
    number = int(np.searchsorted(bounds, place, "right")) - 1
    while place < queries.stop:
        begin, end = int(bounds[number]), min(int(bounds[number + 1]), queries.stop)
        first = number
        number += 1
        while number + 1 < len(bounds) and end < queries.stop and bounds[number + 1] - place <= _SHORTEST_QUERIES:
            end = min(int(bounds[number + 1]), queries.stop)
            number += 1
        ids = runs.ids if number - first > 1 or first in runs.mixed else None
        whole = place == max(begin, keys.start) and ids is None and not 0 < window < end - begin and end <= keys.stop
        size = end - place if whole and (longest is None or end - place <= longest) else most
        for start in range(place, end, size):
            stop = min(start + size, end)
            seen = range(max(begin, keys.start, start - window + 1 if window else 0), min(stop, keys.stop))
            if seen:
                yield Tile(rows, range(start, stop), seen, window, ids)
        place = end

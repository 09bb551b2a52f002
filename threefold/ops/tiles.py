"""Which parts of an attention matrix hold anything: tiles of queries and keys, of a sliding window and of documents.

Whatever a tile leaves out is hidden, so that work and memory follow what is attended to: S · window, or the sum of the
documents' squared lengths, and not S². Nothing here computes; `ops.attention` does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from threefold.ops.kernels import serve_heads
from threefold.torch_private.compilation import softmax_gradient

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


Place = tuple[slice, slice]


@dataclass(frozen=True, eq=False)
class TileInputs:
    """A tile of the attention of the last Q of K positions.

    Attributes:
        tile: which.
        at_queries: where it is in a tensor [B, Q, …].
        at_keys: where it is in a tensor [B, K, …].
        q: [b, heads, queries, d].
        k, v: [b, key-value heads, keys, d].
        bias: [queries, keys], −∞ where a key is hidden from a query and 0 elsewhere; None where none is, and where
            that `tile.is_causal` says it all to a fused kernel.
    """

    tile: Tile
    at_queries: Place
    at_keys: Place
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None

    def of_queries(self, x: Tensor) -> Tensor:
        """Of `x` [B, Q, heads, …] what belongs to the tile, [b, heads, queries, …]."""
        return x[self.at_queries].transpose(1, 2)


def tile_inputs(q: Tensor, k: Tensor, v: Tensor, sight: Sight, shortest_fused: int | None) -> Iterator[TileInputs]:
    """The tiles that together hold every pair of a query and a key that it attends to, each once.

    Args:
        q: [B, Q, heads, d].
        k, v: [B, K, key-value heads, d].
        sight: what hides keys.
        shortest_fused: fewest keys of a tile that a fused kernel computes, which may be long and needs no bias if it is
            causal; None where there is none.
    """
    first, end = k.shape[1] - q.shape[1], k.shape[1]
    alike: dict[tuple[int, int, int], Tensor] = {}
    for tile in tiles(len(q), range(first, end), range(end), sight, 0 if shortest_fused is None else None):
        at_queries = tile.rows, slice(tile.queries.start - first, tile.queries.stop - first)
        at_keys = tile.rows, slice(tile.keys.start, tile.keys.stop)
        fused = shortest_fused is not None and len(tile.keys) >= shortest_fused
        bias = None
        if not (tile.is_full or (fused and tile.is_causal)):
            bias = alike.get(tile.shape) if tile.ids is None else None
            bias = _bias(tile, q) if bias is None else bias
            if tile.ids is None:
                alike[tile.shape] = bias
        of_q, of_k, of_v = (each.transpose(1, 2) for each in (q[at_queries], k[at_keys], v[at_keys]))
        yield TileInputs(tile, at_queries, at_keys, of_q, of_k, of_v, bias)


def _bias(tile: Tile, q: Tensor) -> Tensor:
    hidden = tile.hidden(q.device)
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)


class TileGradients:
    """The gradients of queries, keys and values, to which the tiles add theirs, in fp32 at least.

    Args:
        q, k, v: as of `tile_inputs`.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._dtype = q.dtype
        self._of_q = q.new_empty(q.shape)  # every query is in one tile
        self._of_keys = [each.new_zeros(each.shape, dtype=wide(each)) for each in (k, v)]

    def add(self, part: TileInputs, found: tuple[Tensor, Tensor, Tensor]) -> None:
        """Those of a tile, of its `q`, `k` and `v`."""
        self._of_q[part.at_queries] = found[0].transpose(1, 2)
        for sums, gradient in zip(self._of_keys, found[1:], strict=True):
            sums[part.at_keys] += gradient.transpose(1, 2)

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of `q`, `k` and `v`."""
        of_k, of_v = (each.to(self._dtype) for each in self._of_keys)
        return self._of_q, of_k, of_v


def gradient_shapes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors as of `TileGradients.whole`, not filled."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def wide(x: Tensor) -> torch.dtype:
    """The dtype in which results of several tiles are added up: fp32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


Drop = Callable[[Tensor], Tensor]
"""Dropout of attention weights [B, heads, Q, K], or of their gradient: the same elements every time."""


def plain_tile(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, drop: Drop | None = None) -> Tensor:
    """softmax(Q·Kᵀ/√d + bias)·V, [B, heads, Q, d].

    Args:
        q: [B, heads, Q, d].
        k, v: [B, key-value heads, K, d]; each key-value head serves a group of neighbouring heads of `q` (GQA).
        bias: [Q, K]; None for none.
        drop: of the weights.
    """
    k, v = (serve_heads(each, q.shape[1], 1) for each in (k, v))
    weights = _weights(q, k, bias)
    return _product(weights if drop is None else drop(weights), v)


def plain_tile_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, drop: Drop | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `q`, `k` and `v` of `plain_tile`, to whose result `grad` is the gradient."""
    key_heads = k.shape[1]
    grad, q = grad.contiguous(), q.contiguous()  # two products each
    k, v = (serve_heads(each, q.shape[1], 1) for each in (k, v))
    weights = _weights(q, k, bias)
    to_v = _product((weights if drop is None else drop(weights)).mT, grad)
    of_weights = _product(grad, v.mT)
    if drop is not None:
        of_weights = drop(of_weights)
    of_scores = softmax_gradient(of_weights, weights)
    scale = q.shape[-1] ** -0.5
    to_q, to_k = _product(of_scores, k, scale), _product(of_scores.mT, q, scale)
    return to_q, _of_groups(to_k, key_heads), _of_groups(to_v, key_heads)


def _weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    return _product(q, k.mT, q.shape[-1] ** -0.5, bias).softmax(-1)


def _product(a: Tensor, b: Tensor, scale: float = 1.0, bias: Tensor | None = None) -> Tensor:
    """`scale` · a·b + `bias` of matrices [B, heads, …], each product rounded once."""
    added, beta = (a.new_zeros(()), 0) if bias is None else (bias, 1)
    return torch.baddbmm(added, a.flatten(0, 1), b.flatten(0, 1), beta=beta, alpha=scale).unflatten(0, a.shape[:2])


def _of_groups(gradient: Tensor, key_heads: int) -> Tensor:
    """The gradient of keys or values as all heads have it, added up for the key-value heads."""
    return gradient if gradient.shape[1] == key_heads else gradient.unflatten(1, (key_heads, -1)).sum(2)

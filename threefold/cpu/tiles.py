"""Causal attention tile by tile: only of the parts that a sliding window and the bounds of documents leave.

The parts are computed again in the backward pass (FlashAttention, arXiv 2205.14135): neither the attention matrix nor a
mask of its size ever exists. Compiled code calls all of it as one operator, because the tiles depend on the documents,
which differ from batch to batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from threefold.ops.kernels import PLAIN_SCORING, AttentionMask, Scoring, serve_heads, with_sinks
from threefold.ops.tiles import Ids, Tile
from threefold.torch_private.runtime import cpu_attention, cpu_attention_backward, operator, softmax_gradient

_LONGEST_QUERIES: Final = 256
"""Maximum number of queries in a tile bounded by a window, or with keys before its first query: with more, a larger
part of the tile is masked; with fewer, a call computes too little."""
_SHORTEST_QUERIES: Final = 64
"""Maximum number of queries for which neighboring documents share a tile, and minimum for a tile of a small window."""


def tiles(
    rows: int,
    queries: range,
    keys: range,
    mask: AttentionMask,
    longest: int | None = None,
    shortest: int = _SHORTEST_QUERIES,
) -> Iterator[Tile]:
    """Yield tiles that together contain every pair of a query and a key that it attends to, each once.

    `queries` and `keys` are local positions. A tile that is only causal has at most `longest` queries; None for no
    limit, as fused kernels skip masked blocks. With a small window, a tile has `shortest` queries at least, if there
    are so many.
    """
    if mask.documents is None:
        whole = np.array([0, max(queries.stop, keys.stop)])
        yield from _of_rows(slice(0, rows), _Runs(whole), queries, keys, mask.window, longest, shortest)
        return
    documents = mask.documents.numpy(force=True)
    row = 0
    while row < rows:
        end = row + 1
        while end < rows and np.array_equal(documents[end], documents[row]):
            end += 1
        yield from _of_rows(slice(row, end), _runs(documents[row]), queries, keys, mask.window, longest, shortest)
        row = end


class _Runs(NamedTuple):
    """Documents of a sample, as runs of positions; no token attends out of its run."""

    bounds: Ids  # starts of the runs, and the end of the last
    ids: Ids | None = None  # document of each position; None for one document
    mixed: frozenset[int] = frozenset()  # indices of the runs that several documents share


def _runs(ids: Ids) -> _Runs:
    """Return the runs of a sample: one per document, or one for all parts of a document and everything in between."""
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(ids)) + 1, [len(ids)]])
    if (np.diff(ids) >= 0).all():
        return _Runs(bounds, ids)
    _, number = np.unique(ids, return_inverse=True)
    places, last = np.arange(len(ids)), np.zeros(len(ids), np.int64)
    np.maximum.at(last, number, places)
    closed = np.flatnonzero(np.maximum.accumulate(last[number]) == places) + 1  # no document continues past this point
    bounds = np.concatenate([[0], closed])
    mixed = (run for run, (begin, end) in enumerate(pairwise(bounds)) if (ids[begin:end] != ids[begin]).any())
    return _Runs(bounds, ids, frozenset(mixed))


def _of_rows(
    rows: slice, runs: _Runs, queries: range, keys: range, window: int, longest: int | None, shortest: int
) -> Iterator[Tile]:
    bounds = runs.bounds
    most = min(_LONGEST_QUERIES, max(shortest, window or _LONGEST_QUERIES))
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


Index = tuple[slice, slice]


@dataclass(frozen=True, eq=False)
class TileInputs:
    """A tile of the attention of the last Q of K positions."""

    tile: Tile
    at_queries: Index  # in a tensor [B, Q, …]
    at_keys: Index  # in a tensor [B, K, …]
    q: Tensor  # [b, heads, queries, d]
    k: Tensor  # [b, key-value heads, keys, d], as `v`, whose heads may have another width
    v: Tensor
    # [queries, keys], −∞ for masked keys; None if there are none, or if a fused kernel needs only `tile.is_causal`.
    bias: Tensor | None

    def of_queries(self, x: Tensor) -> Tensor:
        """Take the tile's part of `x` [B, Q, heads, …]: [b, heads, queries, …]."""
        return x[self.at_queries].transpose(1, 2)


def tile_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    shortest_fused: int | None,
    shortest: int = _SHORTEST_QUERIES,
) -> Iterator[TileInputs]:
    """Yield the inputs of `tiles` of `q` [B, Q, heads, d], and `k` and `v` [B, K, key-value heads, d]."""
    # A fused kernel takes tiles of `shortest_fused` keys at least, which may be long and need no bias if causal.
    first, end = k.shape[1] - q.shape[1], k.shape[1]
    alike: dict[tuple[int, int, int], Tensor] = {}
    longest = 0 if shortest_fused is None else None
    for tile in tiles(len(q), range(first, end), range(end), mask, longest, shortest):
        at_queries = tile.rows, slice(tile.queries.start - first, tile.queries.stop - first)
        at_keys = tile.rows, slice(tile.keys.start, tile.keys.stop)
        fused = shortest_fused is not None and len(tile.keys) >= shortest_fused
        bias = None
        if not (tile.is_full or (fused and tile.is_causal)):
            bias = alike.get(tile.shape) if tile.ids is None else None
            if bias is None:
                hidden = tile.hidden(q.device)
                bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
            if tile.ids is None:
                alike[tile.shape] = bias
        of_q, of_k, of_v = (each.transpose(1, 2) for each in (q[at_queries], k[at_keys], v[at_keys]))
        yield TileInputs(tile, at_queries, at_keys, of_q, of_k, of_v, bias)


class TileGradients:
    """Gradients of queries, keys, values and sinks, accumulated over tiles in fp32 at least."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> None:
        self._dtype = q.dtype
        self._of_q = q.new_empty(q.shape)  # every query is in one tile
        self._of_keys = [each.new_zeros(each.shape, dtype=wide(each)) for each in (k, v)]
        self.of_sinks = _sink_gradients(q, sinks).zero_()

    def add(self, part: TileInputs, found: tuple[Tensor, Tensor, Tensor], of_sinks: Tensor | None = None) -> None:
        self._of_q[part.at_queries] = found[0].transpose(1, 2)
        for sums, gradient in zip(self._of_keys, found[1:], strict=True):
            sums[part.at_keys] += gradient.transpose(1, 2)
        if of_sinks is not None:
            self.of_sinks += of_sinks

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        of_k, of_v = (each.to(self._dtype) for each in self._of_keys)
        return self._of_q, of_k, of_v


def gradient_shapes(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), _sink_gradients(q, sinks)


def _sink_gradients(q: Tensor, sinks: Tensor | None) -> Tensor:
    return q.new_empty(0 if sinks is None else len(sinks), dtype=wide(q))


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype for sums of several tiles' results: fp32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


Drop = Callable[[Tensor], Tensor]
"""Dropout of attention weights [B, heads, Q, K], or of their gradient: drops the same elements on each call."""


def plain_tile(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scoring: Scoring = PLAIN_SCORING, drop: Drop | None = None
) -> Tensor:
    """Compute softmax(scores + bias)·V, [B, heads, Q, d], of `q` [B, heads, Q, d] and `bias` [Q, K].

    `k` and `v` are [B, key-value heads, K, d], each head for a group of neighboring heads of `q` (GQA).
    """
    k, v = (serve_heads(each, q.shape[1], 1) for each in (k, v))
    weights = _weights(q, k, bias, scoring)[0][..., : k.shape[2]]
    return _product(weights if drop is None else drop(weights), v)


def plain_tile_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scoring: Scoring = PLAIN_SCORING,
    drop: Drop | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Return the gradients of `q`, `k` and `v`, and of sinks, of `plain_tile`, given that of its result, `grad`."""
    key_heads = k.shape[1]
    grad, q = grad.contiguous(), q.contiguous()  # two products each
    k, v = (serve_heads(each, q.shape[1], 1) for each in (k, v))
    joined, bent = _weights(q, k, bias, scoring)
    weights, of_sinks = joined[..., : k.shape[2]], None
    to_v = _product((weights if drop is None else drop(weights)).mT, grad)
    of_weights = _product(grad, v.mT)
    if drop is not None:
        of_weights = drop(of_weights)
    if scoring.sinks is not None:
        of_weights = F.pad(of_weights, (0, 1))
    of_scores = softmax_gradient(of_weights, joined)
    if scoring.sinks is not None:
        of_sinks = of_scores[..., -1].sum((0, 2), dtype=wide(q))
        of_scores = of_scores[..., :-1]
    if bent is not None:
        of_scores.mul_(bent.square_().neg_().add_(1))
    scale = scoring.factor(q.shape[-1])
    to_q, to_k = _product(of_scores, k, scale), _product(of_scores.mT, q, scale)
    return (to_q, _of_groups(to_k, key_heads), _of_groups(to_v, key_heads)), of_sinks


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, scoring: Scoring) -> tuple[Tensor, Tensor | None]:
    """Return attention weights [B, heads, Q, K], then of sinks, and with a soft cap tanh(score / cap)."""
    cap, scale = scoring.softcap, scoring.factor(q.shape[-1])
    if not cap:
        return with_sinks(_product(q, k.mT, scale, bias), scoring.sinks).softmax(-1), None
    bent = _product(q, k.mT, scale / cap).tanh_()
    found = bent * cap if bias is None else torch.add(bias, bent, alpha=cap)
    return with_sinks(found, scoring.sinks).softmax(-1), bent


def _product(a: Tensor, b: Tensor, scale: float = 1.0, bias: Tensor | None = None) -> Tensor:
    """`scale` · a·b + `bias` of matrices [B, heads, …], each product rounded once."""
    added, beta = (a.new_zeros(()), 0) if bias is None else (bias, 1)
    return torch.baddbmm(added, a.flatten(0, 1), b.flatten(0, 1), beta=beta, alpha=scale).unflatten(0, a.shape[:2])


def _of_groups(gradient: Tensor, key_heads: int) -> Tensor:
    """Sum the gradient of keys or values over the query heads of each key-value head."""
    return gradient if gradient.shape[1] == key_heads else gradient.unflatten(1, (key_heads, -1)).sum(2)


_LONGEST_PLAIN: Final = 512  # keys of a bf16 tile; above it, torch's fused kernel is faster than plain products


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scoring: Scoring = PLAIN_SCORING) -> Tensor:
    """Compute `ops.attention.attention` tile by tile: [B, Q, heads · d]."""
    settings = mask.window, scoring.scale, scoring.softcap
    return _TiledAttention.apply(q, k, v, scoring.sinks, mask.documents, *settings)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        documents: Tensor | None,
        *settings: Any,
    ) -> Tensor:
        out, sums = TILED_ATTENTION(q, k, v, sinks, documents, *settings)
        ctx.save_for_backward(q, k, v, sinks, documents, out, sums)
        ctx.settings = settings
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, documents, out, sums = ctx.saved_tensors
        grad = grad.reshape(out.shape)
        *found, of_sinks = TILED_ATTENTION_BACKWARD(grad, q, k, v, sinks, documents, out, sums, *ctx.settings)
        return *found, None if sinks is None else of_sinks.to(sinks.dtype), *[None] * 4


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    documents: Tensor | None,
    window: int,
    scale: float | None,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, Q, heads, d], and for fused tiles the log-sum-exp of each query's scores [B, Q, heads].

    With a sink, the log-sum-exp includes it; softmax without it is brought to the larger sum.
    """
    out, sums = _forward_shapes(q, k, v)
    scoring = Scoring(scale, softcap, sinks)
    shortest = _shortest_fused(q, v, scoring)
    for part in tile_inputs(q, k, v, AttentionMask(window, documents), shortest, shortest_tile(q)):
        if _is_fused(part, shortest):
            found, total = cpu_attention(part.q, part.k, part.v, part.bias, part.tile.is_causal, scale)
            if sinks is not None:
                joined = torch.logaddexp(total, sinks.to(total.dtype).unsqueeze(1))
                found, total = found * (total - joined).exp_().unsqueeze(-1), joined
            sums[part.at_queries] = total.transpose(1, 2)
        else:
            found = plain_tile(part.q, part.k, part.v, part.bias, scoring)
        out[part.at_queries] = found.transpose(1, 2)
    return out, sums


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return output_shape(q, k, v), q.new_empty(q.shape[:-1], dtype=wide(q))


def output_shape(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    documents: Tensor | None,
    out: Tensor,
    sums: Tensor,
    window: int,
    scale: float | None,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradients, scoring = TileGradients(q, k, v, sinks), Scoring(scale, softcap, sinks)
    shortest = _shortest_fused(q, v, scoring)
    for part in tile_inputs(q, k, v, AttentionMask(window, documents), shortest, shortest_tile(q)):
        upper, of_sinks = part.of_queries(grad), None
        if _is_fused(part, shortest):
            below, total, causal = part.of_queries(out), part.of_queries(sums), part.tile.is_causal
            found = cpu_attention_backward(upper, part.q, part.k, part.v, below, total, part.bias, causal, scale)
            if sinks is not None:  # the weight of a sink times its own gradient, −Σ output · gradient
                weights = (sinks.to(total.dtype).unsqueeze(1) - total).exp_()
                of_sinks = -(weights * (upper * below).sum(-1)).sum((0, 2))
        else:
            found, of_sinks = plain_tile_gradients(upper, part.q, part.k, part.v, part.bias, scoring)
        gradients.add(part, found, of_sinks)
    return *gradients.whole(), gradients.of_sinks


TILED_ATTENTION: Final[Any] = operator("tiled_attention", _forward_shapes)(_forward)
TILED_ATTENTION_BACKWARD: Final[Any] = operator("tiled_attention_backward", gradient_shapes)(_backward)


def shortest_tile(q: Tensor) -> int:
    """Return the minimum number of queries of a tile of a small window.

    A bf16 tile is computed by plain products, which take hardly longer for more queries: what each operation costs by
    itself counts.
    """
    return _LONGEST_QUERIES if q.dtype == torch.bfloat16 else _SHORTEST_QUERIES


def _shortest_fused(q: Tensor, v: Tensor, scoring: Scoring) -> int | None:
    """Return the minimum number of keys of a tile for torch's fused kernel; None where it takes no tiles.

    It is one of CPUs, for values as wide as keys.
    """
    if q.device.type != "cpu" or q.shape[-1] != v.shape[-1] or scoring.softcap:
        return None
    return _LONGEST_PLAIN + 1 if q.dtype == torch.bfloat16 else 0


def _is_fused(part: TileInputs, shortest: int | None) -> bool:
    return shortest is not None and len(part.tile.keys) >= shortest

"""The tiles of an attention matrix, with the parts of queries, keys and values that they are computed from."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.ops.tiles import Sight, Tile, tiles

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

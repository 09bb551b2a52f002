"""Floating-point operations of the matrix products and of the attention that a step runs."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from threefold.ops.attention import TILED_ATTENTION, TILED_ATTENTION_BACKWARD
from threefold.ops.tiles import Sight, tiles
from threefold.random.dropped_attention import DROPPED_ATTENTION, DROPPED_ATTENTION_BACKWARD
from threefold.torch_private.fake import CPU_ATTENTION, CPU_ATTENTION_BACKWARD, ONEDNN_LINEAR

_Formula = Callable[..., int]


def _attention(q: Tensor, k: Tensor, v: Tensor, *_rest: Any, **_options: Any) -> int:
    """q k and the product with v, of all pairs of positions: kernels that skip masked ones do about half of it."""
    batch, heads, queries, width = q.shape
    return 2 * batch * heads * queries * k.shape[2] * (width + v.shape[3])


def _attention_backward(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any, **_options: Any) -> int:
    """The scores once more, and two products for each of those of the forward pass."""
    batch, heads, queries, width = q.shape
    return 2 * batch * heads * queries * k.shape[2] * (3 * width + 2 * v.shape[3])


def _tiled(q: Tensor, k: Tensor, v: Tensor, _documents: Any, window: int, *_rest: Any) -> int:
    """The same of the tiles of a window; documents count as one, as their bounds are in no tensor without memory."""
    return _of_tiles(q, k, window, q.shape[3] + v.shape[3])


def _tiled_backward(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> int:
    window = next(each for each in rest if isinstance(each, int))
    return _of_tiles(q, k, window, 3 * q.shape[3] + 2 * v.shape[3])


def _of_tiles(q: Tensor, k: Tensor, window: int, widths: int) -> int:
    queries = range(k.shape[1] - q.shape[1], k.shape[1])
    parts = tiles(1, queries, range(k.shape[1]), Sight(window))
    return 2 * len(q) * q.shape[2] * widths * sum(len(tile.queries) * len(tile.keys) for tile in parts)


def _linear(x: Tensor, weight: Tensor, *_rest: Any, **_options: Any) -> int:
    return 2 * x.numel() * weight.shape[0]


_OWN: dict[Any, _Formula] = {
    CPU_ATTENTION: _attention,
    CPU_ATTENTION_BACKWARD: _attention_backward,
    ONEDNN_LINEAR: _linear,
    TILED_ATTENTION.overloadpacket: _tiled,
    TILED_ATTENTION_BACKWARD.overloadpacket: _tiled_backward,
    DROPPED_ATTENTION.overloadpacket: _tiled,
    DROPPED_ATTENTION_BACKWARD.overloadpacket: _tiled_backward,
}
"""Of operations that torch's registry has no formula for."""


class FlopCount:
    """Adds up those of the operations that it is told.

    Attributes:
        total: so far.
    """

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """An operation ran with these arguments and result."""
        packet = func.overloadpacket
        own = _OWN.get(packet)
        if own is not None:
            self.total += own(*args, **kwargs)
        elif (formula := flop_registry.get(packet)) is not None:
            self.total += int(formula(*args, **kwargs, out_val=out))

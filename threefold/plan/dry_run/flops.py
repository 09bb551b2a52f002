"""Floating-point operations of the matrix products and of the attention that a step runs."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

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


def _linear(x: Tensor, weight: Tensor, *_rest: Any, **_options: Any) -> int:
    return 2 * x.numel() * weight.shape[0]


_OWN: dict[Any, _Formula] = {
    CPU_ATTENTION: _attention,
    CPU_ATTENTION_BACKWARD: _attention_backward,
    ONEDNN_LINEAR: _linear,
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

"""Gradient compression: sums of gradients over the replicas in 16 bits."""

import torch
from torch import Tensor

from threefold.comm.axis import Axis

COMPRESSIONS = ("none", "fp16", "bf16")
"""Names of the dtypes that gradients may be rounded to while they are summed over the replicas."""
_TOP = 15  # sums stay below 2^15; fp16 overflows at 2^16
_FARTHEST = 126  # 2^126 and 2^-126 are both normal numbers in fp32


class NarrowSum:
    """Asynchronous sum of a bucket (fp32 [n]) over an axis in fp16 or bf16; the sum is bit-equal on all ranks.

    An element that is not finite on one rank is not finite on any rank afterwards. `tp` are the tensor ranks, which sum
    copies or shards of the same parameters.
    """

    def __init__(self, flat: Tensor, axis: Axis, dtype: torch.dtype, tp: Axis | None = None) -> None:
        self._flat, self._axis = flat, axis
        self._narrow, self._exponent = narrowed(flat, axis, dtype, tp)
        self._work = axis.start_all_reduce_(self._narrow)

    def finish(self) -> None:
        """Wait for the sum, and copy it into the bucket."""
        if self._work is not None:
            self._axis.finish_all_reduce(self._work)
        widen_(self._flat, self._narrow, self._exponent)


def narrowed(flat: Tensor, axis: Axis, dtype: torch.dtype, tp: Axis | None = None) -> tuple[Tensor, Tensor | None]:
    """Return a 16-bit copy whose sum over the axis cannot overflow, and the exponent that scaled it (None for bf16).

    Collective over the axis, and over `tp`.
    """
    exponent = _exponent(flat, axis, tp) if dtype == torch.float16 else None
    return (flat if exponent is None else torch.ldexp(flat, exponent)).to(dtype), exponent


def widen_(into: Tensor, narrow: Tensor, exponent: Tensor | None) -> None:
    """Write a sum of tensors from `narrowed` into a wide tensor, unscaled."""
    into.copy_(narrow)
    if exponent is not None:
        torch.ldexp(into, -exponent, out=into)


def _exponent(flat: Tensor, axis: Axis, tp: Axis | None) -> Tensor:
    """Return the exponent (int32) of the power of two that scales ranks · largest element to just below 2^15."""
    largest = axis.all_reduce_max_(torch.linalg.vector_norm(flat, torch.inf))
    if tp is not None:
        tp.all_reduce_max_(largest)
    bound = largest * axis.size
    exponent = _TOP - torch.frexp(bound).exponent
    # No scaling if the largest element is zero or not finite.
    return torch.where(bound.isfinite() & (bound > 0), exponent, 0).clamp(-_FARTHEST, _FARTHEST)

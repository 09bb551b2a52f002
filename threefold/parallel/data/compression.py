"""Gradient compression: a bucket is rounded to 16 bits, summed over the replicas in that dtype, and widened again.

fp16 has 11 bits but few exponents, so each bucket is first scaled into its range: by the largest power of two with
which no sum can overflow, which the replicas agree on by the largest element of any of them; and the tensor ranks, as
what each of them holds whole would else be rounded differently. bf16 has fp32's range and needs no such agreement, but
8 bits.

With n replicas and u half the format's epsilon, an element of the sum is off by at most about n·u·Σ|gᵢ|: each replica's
part is rounded once, and each of the n − 1 additions along the ring once more. In fp16, the smallest step is 2⁻²⁴ of
what the bucket is scaled to, 2¹⁵: elements that are 2³⁹ times smaller than n times the largest are lost.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from threefold.comm.axis import Axis, Work

_TOP = 15  # sums stay below 2^15; fp16 ends just below 2^16
_FARTHEST = 126  # powers of two that fp32 holds in full, both ways


@dataclass
class NarrowSum:
    """An asynchronous sum over replicas of a 16-bit copy.

    Attributes:
        flat: the bucket, which gets the sum in `finish`.
        axis: the replicas.
        narrow: its copy.
        exponent: the copy was multiplied by 2 to this; None for 1.
        work: what to wait for.
    """

    flat: Tensor
    axis: Axis
    narrow: Tensor
    exponent: Tensor | None
    work: Work | None = field(default=None)

    def finish(self) -> None:
        """Wait, and copy the sum into the bucket."""
        if self.work is not None:
            self.axis.finish_all_reduce(self.work)
        widen_(self.flat, self.narrow, self.exponent)


def start_narrow_sum(flat: Tensor, axis: Axis, dtype: torch.dtype, tp: Axis | None = None) -> NarrowSum:
    """Start to sum a bucket over an axis of several ranks in 16 bits; the result has the same bits on all of them.

    Elements that are not finite are not finite on any rank afterwards.

    Args:
        flat: fp32 [n].
        axis: the replicas.
        dtype: `torch.float16` or `torch.bfloat16`.
        tp: the tensor ranks, which sum the same parameters or shards of them; None for no others.
    """
    narrow, exponent = narrowed(flat, axis, dtype, tp)
    return NarrowSum(flat, axis, narrow, exponent, axis.start_all_reduce_(narrow))


def narrowed(flat: Tensor, axis: Axis, dtype: torch.dtype, tp: Axis | None = None) -> tuple[Tensor, Tensor | None]:
    """A 16-bit copy of which a sum over the axis cannot overflow, and the exponent of what it was multiplied by.

    Collective over the axis, and over `tp`.

    Args:
        flat, axis, dtype, tp: as of `start_narrow_sum`.
    """
    exponent = _exponent(flat, axis, tp) if dtype == torch.float16 else None
    return (flat if exponent is None else torch.ldexp(flat, exponent)).to(dtype), exponent


def widen_(into: Tensor, narrow: Tensor, exponent: Tensor | None) -> None:
    """Set a tensor to a sum of what `narrowed` gave."""
    into.copy_(narrow)
    if exponent is not None:
        torch.ldexp(into, -exponent, out=into)


def _exponent(flat: Tensor, axis: Axis, tp: Axis | None) -> Tensor:
    """The power of two that scales n times the largest element of any rank to just below 2^15: its exponent, int32."""
    largest = axis.all_reduce_max_(torch.linalg.vector_norm(flat, torch.inf))
    if tp is not None:
        tp.all_reduce_max_(largest)
    bound = largest * axis.size
    exponent = _TOP - torch.frexp(bound).exponent
    # Nothing is scaled where the largest element is zero or NaN.
    return torch.where(bound.isfinite() & (bound > 0), exponent, 0).clamp(-_FARTHEST, _FARTHEST)

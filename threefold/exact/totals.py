"""Sums over all ranks that do not depend on the order of their additions, and the squared norm of exact runs."""

from collections.abc import Callable, Sequence
from math import frexp, gcd, isfinite, ldexp, nan

import torch
from torch import Tensor

from threefold.comm.axis import Axis
from threefold.exact.grain import Grain


def row_width(parameter: Tensor, grain: Grain) -> int:
    """Return the number of neighboring elements of a parameter that no layout inside the grain cuts."""
    if parameter.dim() < 2:
        return 1
    last = parameter.shape[-1]
    if parameter.dim() == 3:  # of experts, whose last dim either the tensor ranks or the ranks of ZeRO cut
        return last // gcd(last, max(grain.tensor, grain.samples))
    return last // gcd(grain.tensor, last)


def row_norms(gradient: Tensor, width: int) -> Tensor:
    """Return the norm of each run of `width` elements of a contiguous gradient, in fp32 at least. [n]."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    rows = gradient.reshape(-1, width)
    if width == 1:
        return rows.flatten().abs().to(wide)
    # Torch divides the sum of a single row among its threads.
    single = len(rows) == 1
    norms = torch.linalg.vector_norm(rows.expand(2, -1) if single else rows, dim=1, dtype=wide)
    return norms[:1] if single else norms


_DIGITS, _DIGIT_BITS = 3, 22  # the sum of 2^30 digits is exact in fp64


def order_free_digits(values: Tensor, top: Tensor) -> Tensor:
    """Return three numbers whose sums over any number of tensors do not depend on the order of the additions.

    Each of `values` fp64 [n] is cut into digits of a fixed-point number below 2^exponent(top), whose sums are integers
    and exact (Demmel and Nguyen, "Parallel reproducible summation", IEEE Trans. Comput. 64 (2015), with two passes);
    `top` is the largest magnitude on any rank. The result fp64 [3] is for `from_digits`.
    """
    rest = torch.ldexp(values, -torch.frexp(top).exponent)
    digits = []
    for _ in range(_DIGITS):
        rest = rest * 2.0**_DIGIT_BITS
        digit = rest.trunc()
        digits.append(digit.sum())
        rest = rest - digit
    return torch.stack(digits)


def from_digits(digits: Sequence[float], top: float) -> float:
    """Return the sum of all values from the summed digits; NaN if a value was not finite."""
    if not all(map(isfinite, (*digits, top))):
        return nan
    total = 0
    for digit in digits:
        total = (total << _DIGIT_BITS) + int(digit)
    return ldexp(total, frexp(top)[1] - _DIGITS * _DIGIT_BITS)


def sum_exactly(
    values: Sequence[Tensor], counts: Tensor, world: Axis, over_ranks: Callable[[Tensor], list[float]]
) -> tuple[list[float], list[float]]:
    """Sum tensors and counts over all ranks as `RankArithmetic.totals`, independently of the order of the additions."""
    tops = torch.stack([torch.cat([each.abs(), each.new_zeros(1)]).amax() for each in values])
    tops = world.all_reduce_max_(tops)
    digits = torch.stack([order_free_digits(each, top) for each, top in zip(values, tops, strict=True)])
    shared = tops if world.is_first else torch.zeros_like(tops)  # read with the sums: on a GPU, reading waits
    found = over_ranks(torch.cat([digits.T.flatten(), shared, counts]))
    count, places = len(values), range(0, digits.numel(), len(values))
    tops_read = found[digits.numel() : digits.numel() + count]
    sums = [from_digits([found[at + each] for at in places], tops_read[each]) for each in range(count)]
    return sums, found[digits.numel() + count :]

"""Linear layers whose products are in float8 (e4m3), about twice as fast as bf16 ones on GPUs that have them.

Both operands of the output's product, and of the input gradient's, are rounded to e4m3 (4 significant bits;
Micikevicius et al., arXiv 2209.05433), each row along the summed dim with a scale of its own; sums are in fp32. The
weight's gradient, which adds up over all tokens, stays in the dtype of the computation. Nothing is remembered from step
to step, so there is no state to save.

A scale is a power of two, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3). A number is therefore rounded in the same
way for any content of the rest of its row, unless it is below 2⁻¹³ of the row's largest. So rows that tensor
parallelism cuts, each with a scale for its own part, are rounded as whole ones: the layout stays a performance choice.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from threefold.ops.kernels import LinearFunction, gradient_store, product

_EXPONENT: Final = 23  # bits of fp32 below the exponent
_TOP: Final = 7  # the largest of a scaled row is in [2⁷, 2⁸); e4m3 ends at 448
_NOT_FINITE: Final = 255  # biased exponent of infinity and NaN
_LEAST: Final = _TOP + 1  # biased exponent below which a row's largest is scaled no further: the scale would overflow


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear` with products in float8: `x` [..., in], `weight` [out, in], `bias` [out] → [..., out].

    Where the device has no float8 products, those of the dtype of the computation give the same up to rounding.
    Gradients of a weight with an open store are deferred as by `kernels.linear`; not in compiled code.
    """
    store = gradient_store(weight)
    if store is not None and torch.compiler.is_compiling():
        raise NotImplementedError("compiled float8 products cannot defer the gradients of their weights")
    return LinearFunction.apply(x, weight, bias, store, scaled_product)


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return `rows` [n, k] in e4m3, scaled to below 2⁸, and the power of two [n, 1], in fp32, that undoes each scale.

    The scale of a row with a value that is not finite is NaN, since e4m3 has no infinity.
    """
    largest = rows.abs().amax(1, keepdim=True).float()
    exponent = (largest.view(torch.int32) >> _EXPONENT).clamp_min(_LEAST)
    scale = ((2 * 127 + _TOP - exponent).clamp_min(1) << _EXPONENT).view(torch.float32)
    undo = ((exponent - _TOP) << _EXPONENT).view(torch.float32).masked_fill(exponent == _NOT_FINITE, torch.nan)
    return (rows.float() * scale).to(torch.float8_e4m3fn), undo


def scaled_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear(a, b, bias)` of the rounded rows of `a` [m, k] and `b` [n, k]: [m, n], in their dtype."""
    (left, of_left), (right, of_right) = rounded(a), rounded(b)
    (m, k), n = a.shape, len(b)
    fits = m > 0 < n * k and k % 16 == 0 == n % 16  # float8 products need dims of multiples of 16
    if a.is_cuda and a.dtype == torch.bfloat16 and fits and _gpu_has_float8():
        row_wise = F.ScalingType.RowWise
        return F.scaled_mm(
            left, right.contiguous().t(), of_left, row_wise, of_right.t(), row_wise, bias=bias, output_dtype=a.dtype
        )
    # Numbers of 4 bits times powers of two are exact in every dtype with fp32's range.
    return product(left.to(a.dtype) * of_left.to(a.dtype), right.to(a.dtype) * of_right.to(a.dtype), bias)


@torch.compiler.assume_constant_result
def _gpu_has_float8() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9)

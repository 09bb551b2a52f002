"""Shapes for which oneDNN's products, and plain products in place of fused attention, are the fastest on a CPU.

Torch's fp32 linear uses MKL, which takes a slow path on processors other than Intel's; oneDNN, which torch includes,
does not. On Intel's, MKL is faster: oneDNN copies the transposed inputs of a weight's gradient. Torch's fused bf16
attention takes three times as long as plain products, and saves little memory for short sequences.
"""

from typing import Final

import torch
from torch import Tensor

from threefold.host import processor_vendor

_MKL_IS_FAST: Final = torch.backends.mkl.is_available() and processor_vendor() == "GenuineIntel"
"""Whether to use torch's own fp32 products. By processor rather than measurement, so that ranks and restarts agree."""

_HAS_ONEDNN: Final = torch.backends.mkldnn.is_available()


def onednn_serves(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN multiplies `x` by `weight`."""
    return (
        not _MKL_IS_FAST
        and _HAS_ONEDNN
        and x.dtype == torch.float32 == weight.dtype
        and x.is_cpu  # a tenth of the time of `x.device.type`, which counts in each product
        and x.numel() > 0 < weight.numel()
        and not torch.is_autocast_enabled("cpu")
    )


def plain_attention_serves(k: Tensor) -> bool:
    """Return whether attention to keys [B, K, heads, d] uses plain products; above 512 keys, their memory matters."""
    return k.dtype == torch.bfloat16 and k.is_cpu and k.shape[1] <= 512

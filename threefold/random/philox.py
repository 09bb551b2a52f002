"""Initial weights that do not depend on the layout: Philox streams of normal numbers.

Every number is a pure function of what it is for (the seed and a parameter's name) and of its position in the *whole*
tensor. A rank therefore draws exactly its own slice of what one process would draw, on any device, and nothing has to
be saved, forked or replayed.

Sources: Philox, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from math import pi, prod

import torch
from torch import Tensor

from threefold.random.keys import signed
from threefold.random.positions import Slice, row_major

_MASK32 = 0xFFFFFFFF
_AT_ONCE = {"cpu": 1 << 15, "cuda": 1 << 20}
"""Elements worked on at a time: the temporaries stay in a core's cache; on a GPU they are enough for all its cores."""


def _philox2x32(counter: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Philox2x32-10: two independent 32-bit words (in int64) for each 64-bit `counter`."""
    low, high = counter & _MASK32, (counter >> 32) & _MASK32
    round_key = key & _MASK32
    for _ in range(10):
        product = low * 0xD256D193
        low, high = ((product >> 32) & _MASK32) ^ high ^ round_key, product & _MASK32
        round_key = (round_key + 0x9E3779B9) & _MASK32
    return low, high


def _normal(index: Tensor, key: int) -> Tensor:
    """Standard normal numbers (fp64) at these element positions: one Philox block and one Box-Muller pair each."""
    # The upper half of the key is mixed into the counter's upper half, which element positions hardly reach.
    first, second = _philox2x32(index ^ (signed(key >> 32, 32) << 32), key)
    radius = torch.sqrt(-2.0 * torch.log((first.double() + 0.5) / 2**32))
    return radius * torch.cos((second.double() + 0.5) * (2 * pi / 2**32))


def fill_normal_(local: Tensor, std: float, key: int, whole: tuple[int, ...], offset: tuple[int, ...]) -> Tensor:
    """Fill a slice of a tensor with its part of N(0, std²), the same numbers whatever the slicing.

    Args:
        local: the slice to fill, of shape [n0, n1, …], any float dtype and device.
        std: standard deviation.
        key: the whole tensor's stream, from `stream_key`.
        whole: shape of the whole tensor.
        offset: where the slice starts in the whole tensor, per dim.
    """
    if local.numel() == 0 or local.is_meta:
        return local
    parts = [Slice(start, size) for start, size in zip(offset, whole, strict=True)]
    rows = row_major(local.shape[:1], parts[:1], local.device) * prod(whole[1:])
    inner = row_major(local.shape[1:], parts[1:], local.device)
    elements = _AT_ONCE.get(local.device.type, 1 << 15)
    rows_at_once = max(1, elements // inner.numel())
    # By blocks of rows, so that the indices need no memory of the tensor's size.
    for part, first in zip(local.split(rows_at_once), rows.split(rows_at_once), strict=True):
        index = first.unsqueeze(-1) + inner
        part.copy_(_normal_chunks(index.flatten(), key, elements).view(part.shape).mul_(std))
    return local


def _normal_chunks(index: Tensor, key: int, elements: int) -> Tensor:
    return torch.cat([_normal(part, key) for part in index.split(elements)])

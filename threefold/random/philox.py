"""Randomness that does not know the layout.

Every random number here is a pure function of what it is for (the seed and a parameter's name, or the seed, the step
and a sample) and of its position in the *whole* tensor. A rank therefore draws exactly its own slice of what one
process would draw, on any device, and nothing has to be saved, forked or replayed.

Sources: Philox, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); SplitMix64's finaliser, Steele
et al., "Fast splittable pseudorandom number generators" (OOPSLA 2014); the 32-bit mixer, Wellons, "lowbias32" (2018).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import pi, prod
from typing import Protocol

import torch
from torch import Tensor, nn

_MASK32 = 0xFFFFFFFF
_CHUNK = 1 << 15  # elements worked on at a time: the temporaries stay in a core's cache


def stream_key(*parts: int | str) -> int:
    """A 63-bit key for the stream named by `parts`; different parts give unrelated keys."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _signed(value: int, bits: int) -> int:
    """`value` modulo 2**bits as a two's complement number, which is what torch's integers hold."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


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
    first, second = _philox2x32(index ^ (_signed(key >> 32, 32) << 32), key)
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
    rows = _positions(local.shape[:1], parts[:1], local.device) * prod(whole[1:])
    inner = _positions(local.shape[1:], parts[1:], local.device)
    at_once = max(1, _CHUNK // inner.numel())
    # By blocks of rows, so that the indices need no memory of the tensor's size.
    for part, first in zip(local.split(at_once), rows.split(at_once), strict=True):
        index = first.unsqueeze(-1) + inner
        part.copy_(_normal_chunks(index.flatten(), key).view(part.shape).mul_(std))
    return local


class Part(Protocol):
    """Which indices of a dim of a whole tensor a rank holds."""

    def indices(self, size: int, device: torch.device) -> Tensor:
        """Their places (int64 [size]) in the whole dim, for a local dim of `size`."""
        ...

    def whole(self, size: int) -> int:
        """Size of the whole dim."""
        ...


@dataclass(frozen=True)
class Slice:
    """A run of indices: from `start`, of `length` in all (None: as many as are held)."""

    start: int = 0
    length: int | None = None

    def indices(self, size: int, device: torch.device) -> Tensor:
        return torch.arange(self.start, self.start + size, device=device)

    def whole(self, size: int) -> int:
        return size if self.length is None else self.length


_ALL = Slice()


def _positions(shape: Sequence[int], parts: Sequence[Part], device: torch.device) -> Tensor:
    """Row-major positions (int64, flat) that a local tensor's elements have in the whole one, by their `parts`."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for size, part in zip(shape, parts, strict=True):
        index = (index.unsqueeze(-1) * part.whole(size) + part.indices(size, device)).flatten()
    return index


def _normal_chunks(index: Tensor, key: int) -> Tensor:
    return torch.cat([_normal(part, key) for part in index.split(_CHUNK)])


def _mix64(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64: a bijection whose every output bit depends on every input bit."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _signed(0x94D049BB133111EB, 64)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def sample_keys(seed: int, step: int, rows: Tensor) -> Tensor:
    """One 64-bit key for each sample of a step, from which its dropout masks follow.

    Args:
        seed: the run's seed.
        step: the optimizer step.
        rows: int64 [B], each sample's row in the global batch.

    Returns:
        int64 [B].
    """
    return _mix64(rows.to(torch.int64) * _signed(0x9E3779B97F4A7C15, 64) + stream_key("dropout", seed, step))


def keep_mask(keys: Tensor, site: int, shape: torch.Size, p: float, parts: Mapping[int, Part] | None = None) -> Tensor:
    """Which elements of an activation survive dropout.

    A function of each sample's key, of the site and of the element's position in the whole activation of that sample.

    Args:
        keys: int64 [B], from `sample_keys`.
        site: the layer's stream, from `stream_key`.
        shape: the local activation's shape [B, …, n].
        p: probability of dropping an element.
        parts: dim → which part of it this is; dims that are not named are whole.

    Returns:
        bool, of `shape`.
    """
    held = [(parts or {}).get(dim, _ALL) for dim in range(len(shape))]
    row = _positions(shape[1:-1], held[1:-1], keys.device)
    row_keys = _mix64(keys.unsqueeze(-1) + site + row * _signed(0x9E3779B97F4A7C15, 64)).view(shape[:-1])
    # Strong mixing once per row, then a cheap 32-bit mix per element: this runs on every activation.
    column = held[-1].indices(shape[-1], keys.device).to(torch.int32)
    return _mix32(column, row_keys.unsqueeze(-1)) >= min(round(p * 2**32) - 2**31, 2**31 - 1)


def drop(x: Tensor, keys: Tensor, site: int, p: float, parts: Mapping[int, Part]) -> Tensor:
    """`x` without the elements that `keep_mask` drops, the others scaled so that the mean stays."""
    return x * keep_mask(keys, site, x.shape, p, parts).to(x.dtype).mul_(1 / (1 - p))


def _mix32(column: Tensor, row_key: Tensor) -> Tensor:
    """Uniform int32 for each element, from its column and its row's 64-bit key."""
    low = _low_word(row_key)
    high = _low_word(row_key >> 32)
    x = (column ^ low).mul_(_signed(0x7FEB352D, 32))
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x += high
    x *= _signed(0x846CA68B, 32)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _signed(0x9E3779B1, 32)
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    return x


def _low_word(x: Tensor) -> Tensor:
    """The low 32 bits as int32, wrapping (a plain cast of an out-of-range value is undefined on some devices)."""
    return (((x + 2**31) & _MASK32) - 2**31).to(torch.int32)


class Dropout(nn.Module):
    """Dropout whose mask depends on the sample and the position, never on the rank or on what was drawn before.

    Args:
        p: probability of dropping an element.

    Attributes:
        site: stream of this layer; `name_sites` gives every layer of a model its own.
        parts: dim → which part of the whole activation this rank holds (set when a model is split); empty where it is
            whole.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.site = 0
        self.parts: dict[int, Part] = {}

    def draws(self, keys: Tensor | None) -> bool:
        """Whether anything is dropped: only in training, with keys and a positive probability."""
        return self.training and keys is not None and self.p > 0

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """Drop elements of `x` [B, …] by the samples' keys [B]; returns `x` itself where nothing is dropped."""
        if keys is None or not self.draws(keys):
            return x
        return drop(x, keys, self.site, self.p, self.parts)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def name_sites(model: nn.Module) -> None:
    """Give each `Dropout` of the whole model its own stream, keyed by its name."""
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            module.site = stream_key("site", name)

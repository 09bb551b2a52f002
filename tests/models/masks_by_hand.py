"""Dropout masks recomputed without the package, with numpy's unsigned numbers, which wrap."""

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15


def dropout_factors(seed: int, step: int, rows: Iterable[int], name: str, shape: tuple[int, ...], p: float) -> Tensor:
    """Return 0 or 1 / (1 − p) for each element of an activation.

    A function of the seed, the step, the sample's row in the global batch, the layer's name and the element's position
    in the sample, by SplitMix64's finaliser for each row of the last dim and a 32-bit mixer for each element.

    Args:
        seed, step: seed and step of the run.
        rows: rows of the B samples in the global batch.
        name: name of the dropout layer in the whole model.
        shape: shape of the activation, [B, …, n].
        p: probability of dropping an element.
    """
    with np.errstate(over="ignore"):
        samples = np.array([row * _GOLDEN + _key("dropout", seed, step) & (1 << 64) - 1 for row in rows], np.uint64)
        place = np.arange(int(np.prod(shape[1:-1])), dtype=np.uint64) * np.uint64(_GOLDEN)
        keys = _mix64(_mix64(samples)[:, None] + np.uint64(_key("site", name)) + place)
        word = _mix32(np.arange(shape[-1], dtype=np.uint32), keys[..., None])
    kept = (word + np.uint32(1 << 31)).astype(np.int64) >= round(p * 2**32)
    return torch.from_numpy(kept.reshape(shape) / (1 - p))


def _key(*parts: int | str) -> int:
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix32(column: npt.NDArray[np.uint32], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    low, high = key.astype(np.uint32), (key >> np.uint64(32)).astype(np.uint32)
    x = (column ^ low) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) + high
    x = x * np.uint32(0x846CA68B)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x9E3779B1)
    return x ^ (x >> np.uint32(15))

"""Reading of a user's samples, so that each is a function of the seed, the epoch and its number.

While a sample is read, torch's, NumPy's and Python's global generators are in a state that these three decide, whatever
the layout, the number of workers and the samples read before; afterwards they continue where they were. A generator of
the data set's own, and any other state that reading changes, cannot be keyed, and is refused.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from threefold.doors import call_hook
from threefold.errors import UserError
from threefold.random.rng import generators_preserved, seed_generators, stream_key

_WATCHED: Final = 64
"""Samples, from the first one read, of which it is noticed whether they draw random numbers."""
REMEDY: Final = (
    "draw from the global generators of torch, NumPy or random, which are keyed by seed, epoch and sample, or from a "
    "generator that __getitem__ makes of the index"
)


def pass_key(seed: int, epoch: int) -> int:
    """Return the key of an epoch; the key of a sample follows from it and the sample's number."""
    return stream_key("samples", seed, epoch)


class KeyedReader:
    """Reader of a map-style data set's samples under keys; `named` begins messages, such as `data.path is …`.

    The first sample is read again after 2, 4, 8, … calls; a `UserError` is raised if it has changed, or if a generator
    that the data set keeps has moved.

    Attributes:
        draws: whether one of the first samples drew from a global generator.
        at: number of the sample that was read last, or that could not be read.
    """

    def __init__(self, dataset: Any, named: str) -> None:
        self.dataset, self.named = dataset, named
        self.draws = False
        self.at: Any = 0
        self._watched = _WATCHED
        self._kept: AbstractContextManager[Any] | None = None  # made where it reads, which may be another process
        self._calls = 0
        self._first: tuple[Any, int, int] | None = None

    def read(self, numbers: Sequence[Any], keys: Sequence[int]) -> list[Any]:
        """Read samples, each under the key of its pass."""
        with self._unmoved(), generators_preserved():
            found = self._read_together(numbers, keys)
            if found is None:
                found = [self._read_one(number, key) for number, key in zip(numbers, keys, strict=True)]
            self._look_again(numbers, keys, found)
        return found

    def read_plain(self, numbers: Sequence[Any]) -> list[Any]:
        """Read samples that draw nothing, in the presence of other users of the global generators."""
        with self._unmoved():
            found = [self._get(number) for number in numbers]
            self._look_again(numbers, None, found)
        return found

    def _unmoved(self) -> AbstractContextManager[Any]:
        """Return a context that refuses moves of generators that the data set keeps, if a room looks for these."""
        if self._kept is None:
            self._kept = call_hook("kept_generators", self.dataset, self.named) or nullcontext()
        return self._kept

    def _get(self, number: Any) -> Any:
        self.at = number
        return self.dataset[number]

    def _read_one(self, number: Any, key: int) -> Any:
        seed_generators(stream_key("sample", key, number))
        if self.draws or not self._watched:
            return self._get(number)
        self._watched -= 1
        before = positions()
        sample = self._get(number)
        self.draws = positions() != before
        return sample

    def _read_together(self, numbers: Sequence[Any], keys: Sequence[int]) -> list[Any] | None:
        """Read all by `__getitems__`, which is often faster; None without it, or if they draw random numbers."""
        many = getattr(self.dataset, "__getitems__", None)
        if many is None or self.draws:
            return None
        seed_generators(stream_key("sample", keys[0], numbers[0]))
        before = positions()
        try:
            found = [*many([*numbers])]
        except Exception:  # which reading one after the other has again, or has not
            return None
        self.draws = positions() != before
        return None if self.draws else found

    def _look_again(self, numbers: Sequence[Any], keys: Sequence[int] | None, found: Sequence[Any]) -> None:
        self._calls += 1
        if self._first is None:
            if numbers:
                self._first = numbers[0], 0 if keys is None else keys[0], fingerprint_of(found[0])
        elif self._calls & (self._calls - 1) == 0:
            number, key, then = self._first
            sample = self._get(number) if keys is None else self._read_one(number, key)
            if fingerprint_of(sample) != then:
                raise changing(f"{self.named}, whose sample {number}")


def changing(begin: str) -> UserError:
    return UserError(
        f"{begin} changes with what has been read, as with a counter or a generator that the data set keeps, so "
        f"that a run would depend on its layout; {REMEDY}."
    )


def positions() -> tuple[Any, ...]:
    """Return where the global generators are, for comparison."""
    numpy: Any = np.random.get_state(legacy=False)
    inner = numpy["state"]
    place = inner["key"].tobytes() if "key" in inner else repr(inner), inner.get("pos"), numpy.get("has_gauss")
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), place


def fingerprint_of(value: Any) -> int:
    """Return a 63-bit content hash (BLAKE2b) of a nesting of tensors, arrays, numbers and texts."""
    digest = hashlib.blake2b(digest_size=8)
    _add(value, digest)
    return int.from_bytes(digest.digest(), "little") >> 1


def _add(value: Any, digest: Any) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{[*value.shape]}".encode())
        if value.layout == torch.strided and not value.is_nested:
            flat = value.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"{value.dtype}{[*value.shape]}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key, each in value.items():
            digest.update(repr(key).encode())
            _add(each, digest)
    elif isinstance(value, list | tuple):
        for each in value:
            _add(each, digest)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _add(getattr(value, field.name), digest)
    elif isinstance(value, str | bytes | int | float | complex | np.generic | None):
        digest.update(repr(value).encode())

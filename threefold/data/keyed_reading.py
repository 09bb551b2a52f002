"""Reading of a user's samples, so that each is a function of the seed, the epoch and its number.

While a sample is read, torch's, NumPy's and Python's global generators are in a state that these three decide, whatever
the layout, the number of workers and the samples read before; afterwards they continue where they were. A generator of
the data set's own, and any other state that reading changes, cannot be keyed, and is refused.
"""

import itertools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
import torch

from threefold.data.fingerprint import fingerprint_of
from threefold.errors import UserError
from threefold.random.rng import generators_preserved, seed_generators, stream_key

_WATCHED: Final = 64
"""Samples, from the first one read, of which it is noticed whether they draw random numbers."""
_LOOKED_AT: Final = 4096
"""Most objects of a data set among which its own generators are looked for."""
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
        self._own: list[tuple[str, Any]] | None = None  # found where it reads, which may be another process
        self._calls = 0
        self._first: tuple[Any, int, int] | None = None

    def read(self, numbers: Sequence[Any], keys: Sequence[int]) -> list[Any]:
        """Read samples, each under the key of its pass."""
        before = self._own_states()
        with generators_preserved():
            found = self._read_together(numbers, keys)
            if found is None:
                found = [self._read_one(number, key) for number, key in zip(numbers, keys, strict=True)]
            self._look_again(numbers, keys, found)
        self._require_unmoved(before)
        return found

    def read_plain(self, numbers: Sequence[Any]) -> list[Any]:
        """Read samples that draw nothing, in the presence of other users of the global generators."""
        before = self._own_states()
        found = [self._get(number) for number in numbers]
        self._look_again(numbers, None, found)
        self._require_unmoved(before)
        return found

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

    def require_constant(self, number: int) -> int:
        """Read a sample twice under one key; return its fingerprint."""
        once, again = (fingerprint_of(self.read([number], [0])[0]) for _ in range(2))
        if once != again:
            raise changing(f"{self.named}, whose sample {number}")
        return once

    def _own_states(self) -> list[Any]:
        if self._own is None:
            self._own = [*own_generators(self.dataset)]
        return [_state(generator) for _, generator in self._own]

    def _require_unmoved(self, before: list[Any]) -> None:
        for (name, generator), state in zip(self._own or (), before, strict=True):
            if not _equal(_state(generator), state):
                kind = f"{type(generator).__module__.partition('.')[0]}.{type(generator).__name__}"
                raise UserError(
                    f"{self.named}, whose samples draw from {name}, a {kind} that it keeps, so that each depends on "
                    f"those read before it; {REMEDY}."
                )


def changing(begin: str) -> UserError:
    return UserError(
        f"{begin} changes with what has been read, as with a counter or a generator that the data set keeps, so "
        f"that a run would depend on its layout; {REMEDY}."
    )


@contextmanager
def sentences_of_workers() -> Iterator[None]:
    """Raise a `UserError` of a worker process of torch's `DataLoader`, which adds its traceback, as it was raised."""
    try:
        yield
    except UserError as error:
        if "Original Traceback" not in str(error):
            raise
        raise UserError(str(error).strip().splitlines()[-1].partition(": ")[2]) from None


def positions() -> tuple[Any, ...]:
    """Return where the global generators are, for comparison."""
    numpy: Any = np.random.get_state(legacy=False)
    inner = numpy["state"]
    place = inner["key"].tobytes() if "key" in inner else repr(inner), inner.get("pos"), numpy.get("has_gauss")
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), place


_KINDS: Final = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random, torch.Generator)


def own_generators(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the generators that a data set keeps, with their places.

    They are in its attributes, those of the data sets and transforms inside it, or the globals of their modules.
    """
    seen, found, left = set[int](), set[int](), _LOOKED_AT
    queue: list[tuple[str, Any]] = [("it", dataset)]
    python: Any = random.random  # methods of the global generators
    numpy: Any = np.random.rand
    globals_ = {id(python.__self__), id(numpy.__self__), id(torch.default_generator)}
    modules = set[str]()
    while queue and left:
        name, each = queue.pop(0)
        left -= 1
        if id(each) in seen or id(each) in globals_:
            continue
        seen.add(id(each))
        if isinstance(each, _KINDS):
            if id(each) not in found:
                found.add(id(each))
                yield name, each
            continue
        if isinstance(each, Mapping):
            inside = [(f"{name}[{key!r}]", value) for key, value in itertools.islice(each.items(), 64)]
        elif isinstance(each, list | tuple):
            inside = [(f"{name}[{place}]", value) for place, value in enumerate(each[:64])]
        else:
            inside = [(f"{name}.{key}".removeprefix("it."), value) for key, value in _attributes(each)]
            module = type(each).__module__ if not hasattr(each, "__code__") else str(each.__module__)
            if inside and module not in modules and not _is_library(module):
                modules.add(module)
                names = vars(sys.modules.get(module, object)).items()
                inside += [(f"{module}.{key}", value) for key, value in names if isinstance(value, _KINDS)]
        queue += [(at, value) for at, value in inside if isinstance(value, _KINDS) or _may_hold(value)]


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    slots = [slot for kind in type(thing).__mro__ for slot in _names(getattr(kind, "__slots__", ()))]
    named = {**{slot: getattr(thing, slot, None) for slot in slots}, **getattr(thing, "__dict__", {})}
    for code in (thing, getattr(type(thing), "__getitem__", None)):
        free = getattr(getattr(code, "__code__", None), "co_freevars", ())
        for name, cell in zip(free, getattr(code, "__closure__", None) or (), strict=False):
            with suppress(ValueError):  # not assigned yet
                named[name] = cell.cell_contents
    return [*named.items()]


def _names(slots: Any) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_library(module: str) -> bool:
    return module.partition(".")[0] in {"torch", "numpy", "builtins", "datasets", "threefold", "pandas", "pyarrow"}


def _may_hold(value: Any) -> bool:
    return not isinstance(
        value, str | bytes | int | float | complex | bool | None | np.ndarray | torch.Tensor | type
    ) and (isinstance(value, Mapping | list | tuple) or hasattr(value, "__dict__") or hasattr(type(value), "__slots__"))


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return (generator.bit_generator if isinstance(generator, np.random.Generator) else generator).state


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(_equal(one[key], other[key]) for key in one)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)

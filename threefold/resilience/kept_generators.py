"""Generators of random numbers that a user's data set keeps, so that its samples depend on those read before."""

import itertools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import torch

from threefold.data.keyed_reading import REMEDY
from threefold.errors import UserError

_LOOKED_AT: Final = 4096
"""Most objects of a data set among which its own generators are looked for."""


class KeptGenerators:
    """Context of reading that raises a `UserError` if a generator that the data set keeps has moved meanwhile."""

    def __init__(self, dataset: Any, named: str) -> None:
        self._named, self._found = named, [*own_generators(dataset)]
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before = [_state(generator) for _, generator in self._found]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            return
        for (name, generator), state in zip(self._found, self._before, strict=True):
            if not _equal(_state(generator), state):
                kind = f"{type(generator).__module__.partition('.')[0]}.{type(generator).__name__}"
                raise UserError(
                    f"{self._named}, whose samples draw from {name}, a {kind} that it keeps, so that each depends on "
                    f"those read before it; {REMEDY}."
                )


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

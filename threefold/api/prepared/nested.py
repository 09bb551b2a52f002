"""Tensors inside what models return and data loaders yield: tuples, lists, mappings and dataclasses of them."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor of a nested value, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(value: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """The same nested value with `make(tensor)` in the place of each tensor; what has none is returned as it is."""
    if isinstance(value, Tensor):
        return make(value)
    if isinstance(value, MutableMapping):
        made = copy(value)
        for key, each in value.items():
            made[key] = map_tensors(each, make)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(each, make) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(each, make) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        fresh: Any = copy(value)
        for field in fields(value):
            object.__setattr__(fresh, field.name, map_tensors(getattr(value, field.name), make))
        return fresh
    return value

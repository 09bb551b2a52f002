"""State and random draws of an own model outside its state dict, found by running its forward pass from one state."""

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from threefold.random.generators import generators_preserved
from threefold.torch_private.tensors import persistent_buffers, version_of

_OF_TORCH: Final = frozenset(vars(nn.Module()))
"""What every module has, its parameters, buffers, submodules and hooks among it."""
_DEPTH, _MOST = 3, 1000
"""How deep containers and objects in an attribute are looked into, and how many of their elements."""
_GENERATORS: Final[dict[str, Callable[[], object]]] = {
    "torch": lambda: torch.get_rng_state().numpy().tobytes(),
    "random": random.getstate,
    "numpy.random": lambda: repr(np.random.get_state(legacy=False)),
}


@dataclass(frozen=True)
class HiddenState:
    """Findings of `find_hidden_state`.

    Attributes:
        refusal: a clause about state that is no buffer and that the loss depends on; empty where there is none.
        drawing: the module that draws, and the generator that it draws from; empty where none does.
        notes: sentences about attributes that forward changes without an effect on the loss so far.
    """

    refusal: str = ""
    drawing: str = ""
    notes: tuple[str, ...] = ()


def find_hidden_state(model: nn.Module, loss: Callable[[], Tensor]) -> HiddenState:
    """Run a model's forward pass three times, and compare the last two, which begin with equal buffers and generators.

    The first one fills what a model computes once and keeps.

    Args:
        model: in training mode; its persistent buffers are as before in the end, as are the generators.
        loss: its loss of some samples, which runs the forward pass.
    """
    with torch.no_grad():
        with _from_one_state(model):
            loss()
        before = _attributes(model)
        with _from_one_state(model), _watching(model) as drawing:
            first = loss()
        after = _attributes(model)
        with _from_one_state(model):
            second = loss()
    changed = [place for place in after if before.get(place) != after[place]]
    if not torch.equal(first, second):
        return HiddenState(_told(model, changed))
    notes = (
        f"{_place(*place)} is a number that forward changes and no checkpoint has: a resumed run starts it anew."
        for place in changed
        if isinstance(after[place], int | float)
    )
    return HiddenState("", next(iter(drawing), ""), tuple(notes))


def _told(model: nn.Module, changed: Sequence[tuple[str, str]]) -> str:
    if not changed:
        return (
            f"{type(model).__name__} has another loss when the same samples go through it again, though its weights, "
            "buffers and generators are the same, so that neither a resumed run nor another layout would compute the "
            "same; have forward depend on its inputs, parameters and buffers alone"
        )
    name, attribute = changed[0]
    register = f"self.register_buffer({attribute!r}, torch.zeros(()))"
    if isinstance(_get(model, name, attribute), Tensor):
        register = f"self.register_buffer({attribute!r}, …)"
    return (
        f"{_place(name, attribute)} is no buffer, forward changes it and the loss depends on it, so that a resumed run "
        f"would compute something else; make it one in the constructor, {register}"
    )


def _place(name: str, attribute: str) -> str:
    return f"The attribute {attribute!r} of {name!r}" if name else f"The attribute {attribute!r} of the model"


def _get(model: nn.Module, name: str, attribute: str) -> Any:
    return getattr(model.get_submodule(name), attribute)


@contextmanager
def _watching(model: nn.Module) -> Iterator[list[str]]:
    """Note, in the block, the modules whose forward pass draws from a generator, the innermost of the first ones
    first."""
    found: list[str] = []
    begun: list[dict[str, object]] = [_states()]
    names = {module: name for name, module in model.named_modules()}

    def before(_module: nn.Module, _inputs: Any) -> None:
        begun.append(_states())

    def after(module: nn.Module, _inputs: Any, _output: Any) -> None:
        note(repr(names[module]) if names[module] else "The model")

    def note(place: str) -> None:
        earlier, now = begun.pop(), _states()
        found.extend(f"{place} draws from {name}" for name in now if now[name] != earlier[name])

    handles = [module.register_forward_pre_hook(before) for module in names]
    handles += [module.register_forward_hook(after) for module in names]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    note("The model")


def _states() -> dict[str, object]:
    return {name: state() for name, state in _GENERATORS.items()}


@contextmanager
def _from_one_state(model: nn.Module) -> Iterator[None]:
    """Put persistent buffers and generators back after the block."""
    kept = [
        (module, name, value, value.clone()) for module in model.modules() for name, value in persistent_buffers(module)
    ]
    with generators_preserved():
        yield
    for module, name, value, before in kept:
        setattr(module, name, value)
        value.copy_(before)


def _attributes(model: nn.Module) -> dict[tuple[str, str], object]:
    """Marks of the values of each attribute of each module, and of each buffer that is not persistent."""
    found: dict[tuple[str, str], object] = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _OF_TORCH:
                found[name, attribute] = _mark(value, _DEPTH)
        persistent = dict(persistent_buffers(module))
        for attribute, value in module.named_buffers(recurse=False, remove_duplicate=False):
            if attribute not in persistent:
                found[name, attribute] = _mark(value, _DEPTH)
    return found


def _mark(value: Any, depth: int) -> object:
    """Something that is equal while a value stays as it is."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return (id(value), version_of(value))
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, nn.Module | type) or callable(value) or not depth:
        return id(value)
    if isinstance(value, Mapping):
        return [(_mark(key, depth - 1), _mark(each, depth - 1)) for key, each in islice(value.items(), _MOST)]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [len(value), *(_mark(each, depth - 1) for each in islice(value, _MOST))]
    return _mark(vars(value), depth) if hasattr(value, "__dict__") else id(value)

"""State and random draws of an own model outside its state dict, found by running its forward pass from one state."""

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from threefold.random.generators import generators_preserved
from threefold.torch_private.tensors import persistent_buffers, version_of

_OF_TORCH: Final = frozenset(vars(nn.Module()))
"""What every module has, its parameters, buffers, submodules and hooks among it."""
_ALIKE: Final = 1e-4
"""Relative difference up to which gradients count as equal."""
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


def find_hidden_state(
    model: nn.Module, make: Callable[[], nn.Module], loss: Callable[[nn.Module], Tensor]
) -> HiddenState:
    """Run a model's passes three times, and those of a model that is made anew with its parameters and buffers once.

    All begin with equal parameters, buffers and generators. The first passes fill what a model computes once and keeps;
    the others are compared.

    Args:
        model: in training mode; its parameters and persistent buffers are as before in the end, as are the generators.
        make: makes another one as `model` was made.
        loss: a model's loss of some samples, which runs the forward pass.
    """
    names = model.state_dict().keys()
    with state_preserved(model):
        _passes(model, loss)
    if late := sorted(model.state_dict().keys() - names):
        return HiddenState(
            f"forward makes {late[0]!r}, which no optimizer, checkpoint or other rank knows; make it in the "
            "constructor, at its full size, and write to it in forward"
        )
    before = _attributes(model)
    with state_preserved(model), _watching(model) as drawing:
        first = _passes(model, loss)
    after = _attributes(model)
    with state_preserved(model):
        second = _passes(model, loss)
    changed = [place for place in after if before.get(place) != after[place]]
    if not _are_equal(first, second):
        return HiddenState(_told(model, changed))
    another = make()
    _copy_state(model, another)
    kept, made = _attributes(model, by_value=True), _attributes(another, by_value=True)
    with state_preserved(another):
        third = _passes(another, loss)
    if not _are_equal(first, third):
        return HiddenState(_told_made(kept, made))
    notes = (
        f"{_place(*place)} is a number that forward changes and no checkpoint has: a resumed run starts it anew."
        for place in changed
        if isinstance(after[place], int | float)
    )
    return HiddenState("", next(iter(drawing), ""), tuple(notes))


def _told(model: nn.Module, changed: Sequence[tuple[str, str]]) -> str:
    if not changed:
        return (
            f"{type(model).__name__} has another loss, or other gradients, when the same samples go through it again, "
            "though its weights, buffers and generators are the same, so that neither a resumed run nor another layout "
            "would compute the same; have forward depend on its inputs, parameters and buffers alone"
        )
    name, attribute = changed[0]
    if attribute in dict(model.get_submodule(name).named_buffers(recurse=False)):
        return (
            f"The buffer {attribute!r} of {name!r} is not persistent, forward changes it and the loss depends on it, "
            "so that a resumed run would compute something else; register it without persistent=False"
        )
    register = f"self.register_buffer({attribute!r}, torch.zeros(()))"
    if isinstance(_get(model, name, attribute), Tensor):
        register = f"self.register_buffer({attribute!r}, …)"
    return (
        f"{_place(name, attribute)} is no buffer, forward changes it and the loss depends on it, so that a resumed run "
        f"would compute something else; make it one in the constructor, {register}"
    )


def _told_made(kept: dict[tuple[str, str], object], made: dict[tuple[str, str], object]) -> str:
    differing = next((place for place in kept if kept[place] != made.get(place)), None)
    if differing is None:
        return (
            "the loss is another one in a model that is made anew with the same parameters and buffers, so that a "
            "resumed run would compute something else; have forward depend on inputs, parameters and buffers alone"
        )
    return (
        f"{_place(*differing)} is another one in a model that is made anew with the same parameters and buffers, and "
        "the loss depends on it, so that a resumed run would compute something else; have it follow from the "
        f"constructor's arguments, or make it a buffer, self.register_buffer({differing[1]!r}, …)"
    )


def _passes(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    """The loss, and the gradients of a backward pass, of which a state may be too."""
    model.zero_grad()
    mean = loss(model)
    if mean.requires_grad:
        mean.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    return [mean.detach(), *gradients]


def _are_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether losses are equal, and gradients but for the order in which threads may add up."""
    return (
        len(one) == len(other)
        and torch.equal(one[0], other[0])
        and all(
            a.shape == b.shape and not (a - b).abs().max() > _ALIKE * a.abs().max()
            for a, b in zip(one[1:], other[1:], strict=True)
        )
    )


@torch.no_grad()
def _copy_state(model: nn.Module, another: nn.Module) -> None:
    """Give a model the parameters and persistent buffers of one that was made alike."""
    state = dict(another.named_parameters())
    for name, parameter in model.named_parameters():
        if name in state:
            state[name].copy_(parameter)
    for module, other in zip(model.modules(), another.modules(), strict=True):
        others = dict(persistent_buffers(other))
        for name, value in persistent_buffers(module):
            if name in others:
                others[name].copy_(value)


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
def state_preserved(model: nn.Module) -> Iterator[None]:
    """Put parameters, persistent buffers and generators back after the block."""
    places = [
        (module, name, value)
        for module in model.modules()
        for name, value in (*module.named_parameters(recurse=False), *persistent_buffers(module))
    ]
    kept = [(module, name, value, value.detach().clone()) for module, name, value in places]
    with generators_preserved():
        yield
    with torch.no_grad():
        for module, name, value, before in kept:
            setattr(module, name, value)
            value.copy_(before)


def _attributes(model: nn.Module, by_value: bool = False) -> dict[tuple[str, str], object]:
    """Marks of the values of each attribute of each module, and of each buffer that is not persistent.

    Args:
        model: with the attributes.
        by_value: whether marks are to be compared with those of another model.
    """
    found: dict[tuple[str, str], object] = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _OF_TORCH:
                found[name, attribute] = _mark(value, _DEPTH, by_value)
        persistent = dict(persistent_buffers(module))
        for attribute, value in module.named_buffers(recurse=False, remove_duplicate=False):
            if attribute not in persistent:
                found[name, attribute] = _mark(value, _DEPTH, by_value)
    return found


def _mark(value: Any, depth: int, by_value: bool = False) -> object:
    """Something that is equal while a value stays as it is."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        if by_value:
            return None if value.is_meta else value.detach().tolist()
        return (id(value), version_of(value))
    if isinstance(value, np.ndarray):
        return value.tobytes()
    mark = partial(_mark, depth=depth - 1, by_value=by_value)
    if isinstance(value, nn.Module | type) or callable(value) or not depth:
        return None if by_value else id(value)
    if isinstance(value, Mapping):
        return [(mark(key), mark(each)) for key, each in islice(value.items(), _MOST)]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [len(value), *(mark(each) for each in islice(value, _MOST))]
    if hasattr(value, "__dict__"):
        return _mark(vars(value), depth, by_value)
    return None if by_value else id(value)

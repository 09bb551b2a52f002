"""What a checkpoint has of a prepared model and its optimizer."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from threefold.api.prepared.module import PreparedModule
from threefold.api.prepared.optimizer import PreparedOptimizer
from threefold.parallel.parameter import like, local, stored


def tensors_of(model: PreparedModule) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, as global tensors that share memory with the model's."""
    kept = model.module.state_dict(keep_vars=True)
    found: dict[str, Tensor] = {}
    parameters = {id(parameter): parameter for parameter in model.module.parameters()}
    seen: set[int] = set()
    for name, value in kept.items():
        if not isinstance(value, Tensor) or id(value) in seen:  # a tied weight once
            continue
        seen.add(id(value))
        parameter = parameters.get(id(value))
        if parameter is None:
            found[name] = value.detach()
        else:
            whole = stored(parameter)
            found[name] = like(whole, local(whole).detach())
    return found


def weights_of(optimizer: PreparedOptimizer) -> Iterator[tuple[str, Tensor]]:
    """The weights of an optimizer, as they are stored, in the order of its groups."""
    yield from zip(optimizer.names, optimizer.weights, strict=True)


def states_of(optimizer: PreparedOptimizer) -> Iterator[tuple[str, str, Any, Tensor]]:
    """Name of the weight, name of the state, its value, and that as a tensor of the whole model. Collective."""
    names = optimizer.names
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if value is not None:
                yield names[number], name, value, torch.as_tensor(value)


def fill(optimizer: PreparedOptimizer, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the state of an optimizer.

    Args:
        optimizer: prepared.
        states: by the weight's name and the state's, of whole tensors.
    """
    own = optimizer.state_dict()
    found = {number: dict(states[name]) for number, name in enumerate(optimizer.names) if states.get(name)}
    optimizer.load_state_dict({**own, "state": found})

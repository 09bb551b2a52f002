"""Sharded weights for an optimizer that needs whole ones: each weight is updated by one rank, which owns it.

The optimizer state of a weight is on its owner alone, so that the state is sharded as with ZeRO. For an update the
gradients and weights are gathered one after another; the owner updates, and the others take their shards of the result.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from threefold.api.prepared.shards import slice_of
from threefold.comm.axis import Axis
from threefold.parallel.parameter import like, local, whole


class OwnedWeights:
    """The weights of an optimizer, each owned by one of the ranks that shard them.

    The groups of the optimizer have the whole weights that this rank owns.

    Args:
        optimizer: one that updates each weight independently of the others.
        groups: the weights of each of its groups, as they are stored.
        ranks: those that update.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[Sequence[Tensor]], ranks: Axis) -> None:
        self._optimizer, self._ranks = optimizer, ranks
        self._weights = [weight for group in groups for weight in group]
        self._owners = _owners([weight.numel() for weight in self._weights], ranks.size)
        self._owned: dict[int, nn.Parameter] = {}
        number = 0
        for group, weights in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = []
            for weight in weights:
                if self._owners[number] == ranks.index:
                    empty = torch.empty(weight.shape, dtype=weight.dtype, device=local(weight).device)
                    self._owned[number] = nn.Parameter(empty)
                    group["params"].append(self._owned[number])
                number += 1
        self._sizes = [len(weights) for weights in groups]

    @torch.no_grad()
    def step(self) -> None:
        """Update all weights with the gradients of their local shards. Collective."""
        changed = [number for number, weight in enumerate(self._weights) if local(weight).grad is not None]
        for owned in self._owned.values():
            owned.grad = None
        for number in changed:
            weight = self._weights[number]
            gradient, value = whole(like(weight, local(weight).grad)), whole(weight)  # type: ignore[arg-type]
            if number in self._owned:
                self._owned[number].copy_(value)
                self._owned[number].grad = gradient.clone()
        self._optimizer.step()
        for number in changed:
            weight, owner = self._weights[number], self._owners[number]
            mine = self._owned.get(number)
            value = torch.empty(weight.shape, dtype=weight.dtype, device=local(weight).device)
            value = self._ranks.broadcast_(value if mine is None else mine.detach(), owner)
            local(weight).detach().copy_(slice_of(weight, value))

    def state_dict(self) -> dict[str, Any]:
        """As on one process, on every rank. Collective."""
        own = self._optimizer.state_dict()
        numbers = sorted(self._owned)
        parts = self._ranks.gather_objects({numbers[place]: state for place, state in own["state"].items()})
        state = {number: each for part in parts for number, each in part.items()}
        groups, start = [], 0
        for group, size in zip(own["param_groups"], self._sizes, strict=True):
            groups.append({**group, "params": list(range(start, start + size))})
            start += size
        return {**own, "state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, in this or another layout."""
        places = {number: place for place, number in enumerate(sorted(self._owned))}
        state = {places[number]: each for number, each in state_dict["state"].items() if number in places}
        groups = [
            {**group, "params": [places[number] for number in group["params"] if number in places]}
            for group in state_dict["param_groups"]
        ]
        self._optimizer.load_state_dict({**state_dict, "state": state, "param_groups": groups})


def _owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owner of each weight: the largest weights first, each to the rank that has least."""
    load, owners = [0] * ranks, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda each: (-sizes[each], each)):
        owners[number] = load.index(min(load))
        load[owners[number]] += sizes[number]
    return owners

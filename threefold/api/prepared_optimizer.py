"""Prepared optimizers and learning-rate schedules, around the originals."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from threefold.api.prepared_model import GradSync
from threefold.comm.axis import Axis
from threefold.errors import UserError
from threefold.parallel.parameter import like, local, slice_of, stored, whole


class WrappedOptimizer(Optimizer):
    """Optimizer that delegates to another one whatever it does not implement itself.

    It is not initialised as an `Optimizer`: parameters, state and hooks are the original's (`optimizer`). Subclasses
    define `step` and `zero_grad`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the original."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the original."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Defaults of the original."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet, as during copying
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


class OwnedWeights:
    """Weights of an optimizer, each owned and updated by one of the ranks that shard them.

    The groups of the optimizer contain the whole weights that this rank owns.

    Args:
        optimizer: optimizer that updates each weight independently of the others.
        groups: weights of each of its groups, as they are stored.
        ranks: axis of the ranks that update.
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
        """Return the state as on one process, on every rank. Collective."""
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
        """Load a state from `state_dict`, saved in this or another layout."""
        places = {number: place for place, number in enumerate(sorted(self._owned))}
        state = {places[number]: each for number, each in state_dict["state"].items() if number in places}
        groups = [
            {**group, "params": [places[number] for number in group["params"] if number in places]}
            for group in state_dict["param_groups"]
        ]
        self._optimizer.load_state_dict({**state_dict, "state": state, "param_groups": groups})


def _owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the owner of each weight: the largest weights first, each to the rank with the least load."""
    load, owners = [0] * ranks, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda each: (-sizes[each], each)):
        owners[number] = load.index(min(load))
        load[owners[number]] += sizes[number]
    return owners


ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers that treat elements of a weight independently, so updating a shard equals updating the whole."""


class PreparedOptimizer(WrappedOptimizer):
    """An optimizer returned by `prepare`, with the same groups, state and defaults.

    `step` does nothing while gradients are accumulated or if they overflowed in fp16. `state_dict` has whole tensors in
    any layout; it is collective if the state is sharded.

    Attributes:
        optimizer: the original, over this rank's shards; or over the whole weights that this rank owns, if it needs
            whole weights and they are sharded (`OwnedWeights`).
        sync: gradient synchronization.
        names: names of its weights, in the order of its groups.
        weights: the weights in that order, as the model stores them.
    """

    def __init__(self, optimizer: Optimizer, before: Mapping[str, nn.Parameter], sync: GradSync) -> None:
        super().__init__(optimizer)
        self.sync = sync
        self._seen_updates = sync.updates
        self._owned: OwnedWeights | None = None
        names = {id(parameter): name for name, parameter in before.items()}
        groups = [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        weights = [[stored(sync.all_parameters[name]) for name in group] for group in groups]
        self.names = [name for group in groups for name in group]
        self.weights = [weight for group in weights for weight in group]
        if any(isinstance(each, DTensor) for each in self.weights) and type(optimizer) not in ELEMENTWISE:
            self._owned = OwnedWeights(optimizer, weights, sync.mesh.world)
            return
        for group, held in zip(optimizer.param_groups, weights, strict=True):
            group["params"] = [local(weight) for weight in held]

    @property
    def loss(self) -> float:
        """Mean loss over all rows of the last complete update, the same on every rank."""
        return self.sync.loss

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last `step` updated nothing, because gradients are being accumulated or overflowed."""
        return self.sync.is_accumulating or self.sync.overflowed

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights once their gradients are complete.

        Raises:
            UserError: a closure is given, or `backward` was not called since the last step.
        """
        if closure is not None:
            raise UserError(
                "optimizer.step was given a closure, which a prepared optimizer cannot run again; call "
                "threefold.backward(loss) and then step()."
            )
        if self.sync.is_accumulating:
            return
        if self.sync.updates == self._seen_updates:
            raise UserError(
                "optimizer.step was called without gradients; call threefold.backward(loss) in the place of "
                "loss.backward() before it."
            )
        self._seen_updates = self.sync.updates
        self.sync.gradients_used()
        if not self.sync.overflowed:
            if self._owned is not None:
                self._owned.step()
            else:
                self.optimizer.step()
            self.sync.weights_changed()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Allow the gradients to be overwritten; they are cleared when the next update begins."""
        self.sync.gradients_used()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UserError: the gradients of an added group would not be summed."""
        raise UserError("add_param_group was called on a prepared optimizer; add the group before prepare.")

    def state_dict(self) -> dict[str, Any]:
        """Return the state as on one process, with whole tensors. Collective if the state is sharded."""
        if self._owned is not None:
            return self._owned.state_dict()
        state, held = self.optimizer.state_dict(), self.weights
        return {**state, "state": {index: _joined(held[index], each) for index, each in state["state"].items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load whole tensors; each rank keeps its shards."""
        if self._owned is not None:
            return self._owned.load_state_dict(state_dict)
        given, held = state_dict["state"].items(), self.weights
        state = {index: _cut(held[index], each) for index, each in given if index < len(held)}
        self.optimizer.load_state_dict({**state_dict, "state": state})


class PreparedScheduler:
    """Learning-rate schedule returned by `prepare`, around `scheduler`; it steps once per optimizer update."""

    def __init__(self, scheduler: Any, sync: GradSync) -> None:
        self.scheduler, self.sync = scheduler, sync

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, unless gradients are being accumulated or the update was skipped for an fp16 overflow."""
        if self.sync.is_accumulating or self.sync.overflowed:
            return
        self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not set yet, as during copying
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def require_matches(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], sharded: bool) -> None:
    """Check that an optimizer updates only parameters of a model.

    Args:
        parameters: parameters of the model before sharding.
        sharded: whether they will be sharded, so that the optimizer must not have a state yet.

    Raises:
        UserError: it has other parameters, a state that does not fit, or computes the loss itself (LBFGS).
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError("The optimizer is LBFGS, which computes the loss again by itself; use AdamW.")
    known = {id(parameter) for parameter in parameters.values()}
    held = [each for group in optimizer.param_groups for each in group["params"]]
    foreign = sum(id(each) not in known for each in held)
    if foreign:
        raise UserError(
            f"{foreign} of the optimizer's {len(held)} parameters are not of the model; make it of "
            "model.parameters() before prepare."
        )
    if sharded and optimizer.state:
        raise UserError(
            "The optimizer has stepped already, so that its state is of whole weights; prepare it before its first "
            "step, and load a state after that."
        )


def _joined(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    shape = local(parameter).shape
    return {name: whole(like(parameter, each)) if _is_of(each, shape) else each for name, each in state.items()}


def _cut(parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    shape = parameter.shape
    return {name: slice_of(parameter, each).clone() if _is_of(each, shape) else each for name, each in state.items()}


def _is_of(value: Any, shape: torch.Size) -> bool:
    """Return whether a state has a value for each element of a weight of this shape."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == shape

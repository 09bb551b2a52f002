"""Prepared optimizers and learning-rate schedules, around the originals."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from threefold.api.checkpoint import LoopModel, LoopOptimizer
from threefold.comm.axis import Axis
from threefold.compat.prepared.model import GradSync, PreparedModule
from threefold.errors import UserError
from threefold.parallel.leaf import like, local, stored
from threefold.parallel.parameter import slice_of, whole


class WrappedOptimizer(Optimizer):
    """Optimizer that delegates all but `step` and `zero_grad` to another one.

    It is not initialised as an `Optimizer`: parameters, state and hooks are the other's.
    """

    _step_supports_amp_scaling = False
    """What `GradScaler` asks: a fused optimizer would unscale by attributes set on it, which are set on this one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet, as during copying
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


class OwnedWeights:
    """Weights of an optimizer, each owned and updated by one of the `ranks` that shard them.

    The groups of the optimizer, which updates each weight independently of the others, contain the whole weights that
    this rank owns; `groups` are its weights as they are stored.
    """

    def __init__(self, optimizer: Optimizer, groups: Sequence[Sequence[Tensor]], ranks: Axis) -> None:
        self._optimizer, self._ranks = optimizer, ranks
        self._weights = [weight for group in groups for weight in group]
        # The largest weights first, each to the rank with the least load.
        load, self._owners = [0] * ranks.size, [0] * len(self._weights)
        for number, weight in sorted(enumerate(self._weights), key=lambda each: (-each[1].numel(), each[0])):
            self._owners[number] = load.index(min(load))
            load[self._owners[number]] += weight.numel()
        self._owned = {
            number: nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device=local(weight).device))
            for number, weight in enumerate(self._weights)
            if self._owners[number] == ranks.index
        }
        self._numbers: list[range] = []
        for group, weights in zip(optimizer.param_groups, groups, strict=True):
            start = self._numbers[-1].stop if self._numbers else 0
            self._numbers.append(range(start, start + len(weights)))
            group["params"] = [self._owned[number] for number in self._numbers[-1] if number in self._owned]

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
        found = self._optimizer.state_dict()
        numbers = sorted(self._owned)
        parts = self._ranks.gather_objects({numbers[place]: state for place, state in found["state"].items()})
        state = {number: each for part in parts for number, each in part.items()}
        pairs = zip(found["param_groups"], self._numbers, strict=True)
        groups = [{**group, "params": list(numbers)} for group, numbers in pairs]
        return {**found, "state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`, saved in this or another layout."""
        places = {number: place for place, number in enumerate(sorted(self._owned))}
        state = {places[number]: each for number, each in state_dict["state"].items() if number in places}
        groups = [
            {**group, "params": [places[number] for number in group["params"] if number in places]}
            for group in state_dict["param_groups"]
        ]
        self._optimizer.load_state_dict({**state_dict, "state": state, "param_groups": groups})


ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]
)
"""Optimizers that treat elements of a weight independently, so updating a shard equals updating the whole."""


class PreparedOptimizer(LoopOptimizer, WrappedOptimizer):
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

    made_by = "prepare"

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
        self.sync.refuse_foreign_gradients()
        if self.sync.is_accumulating:
            return
        if self.sync.updates == self._seen_updates:
            raise UserError(
                "optimizer.step was called without gradients; call threefold.backward(loss) instead of "
                "loss.backward() before it."
            )
        self._seen_updates = self.sync.updates
        self.zero_grad()
        if not self.sync.overflowed:
            (self._owned or self.optimizer).step()
            self.sync.gradients.weights_changed()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Allow the gradients to be overwritten; they are cleared when the next update begins."""
        self.sync.discard()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UserError: the gradients of an added group would not be summed."""
        raise UserError("add_param_group was called on a prepared optimizer; add the group before prepare.")

    def state_dict(self) -> dict[str, Any]:
        """Return the state as on one process, with whole tensors. Collective if the state is sharded."""
        if self._owned is not None:
            return self._owned.state_dict()
        found = self.optimizer.state_dict()
        state = {number: _mapped(self.weights[number], values, joins=True) for number, values in found["state"].items()}
        return {**found, "state": state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load whole tensors; each rank keeps its shards."""
        if self._owned is not None:
            return self._owned.load_state_dict(state_dict)
        given = state_dict["state"]
        state = {n: _mapped(weight, given[n], joins=False) for n, weight in enumerate(self.weights) if n in given}
        self.optimizer.load_state_dict({**state_dict, "state": state})

    def is_of(self, model: LoopModel) -> bool:
        return isinstance(model, PreparedModule) and self.sync is model.sync

    def parts(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        return ((name, weight, None) for name, weight in zip(self.names, self.weights, strict=True))

    def states(self) -> Iterator[tuple[str, str, Any, Tensor]]:
        for number, state in self.state_dict()["state"].items():
            for name, value in state.items():
                if value is not None:
                    yield self.names[number], name, value, torch.as_tensor(value)

    def fill_states(self, shards: Mapping[str, Mapping[str, Tensor]], others: Mapping[str, Mapping[str, Any]]) -> None:
        found = {number: dict(others[name]) for number, name in enumerate(self.names) if others.get(name)}
        self.load_state_dict({**self.state_dict(), "state": found})


def _mapped(weight: Tensor, state: Mapping[str, Any], joins: bool) -> dict[str, Any]:
    """Return a weight's state with each tensor of the weight's shape joined from the ranks' shards, or cut to one."""
    shape = (local(weight) if joins else weight).shape

    def mapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != shape:
            return value
        return whole(like(weight, value)) if joins else slice_of(weight, value).clone()

    return {name: mapped(value) for name, value in state.items()}


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
    """Check that an optimizer updates only parameters of a model, and has no state yet if they will be sharded."""
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

"""A prepared optimizer and learning-rate schedule: they step once per update, whatever is accumulated."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from threefold.api.prepared.grad_sync import GradSync
from threefold.api.prepared.shards import slice_of
from threefold.api.prepared.whole_weights import OwnedWeights
from threefold.api.wrapped_optimizer import WrappedOptimizer
from threefold.errors import UserError
from threefold.parallel.parameter import like, local, stored, whole

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
"""Optimizers that treat every element of a weight independently, so that they update a shard as they do the whole."""


class PreparedOptimizer(WrappedOptimizer):
    """What `prepare` returns for an optimizer, with the same groups, state and defaults.

    `step` does nothing while gradients are accumulated, and nothing where they overflowed in fp16. `state_dict` has
    whole tensors, whatever the layout; it is collective where the state is sharded.

    Attributes:
        optimizer: the original, over this rank's shards; or over the whole weights that this rank owns, where it needs
            whole ones and they are sharded (`whole_weights`).
        sync: the gradients.
        names: of its weights, in the order of its groups.
        weights: the same, as the model stores them.
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
        """The mean loss over all rows of the last update, the same on every rank; while gradients are accumulated, that
        of the update before."""
        return self.sync.loss

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last `step` updated nothing, because gradients are being accumulated or overflowed."""
        return self.sync.is_accumulating or self.sync.overflowed

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights once their gradients are complete.

        Raises:
            UserError: a closure is given, or there has been no `backward` since the last step.
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
        """Allow the gradients to be overwritten: they are cleared when those of the next update begin."""
        self.sync.gradients_used()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: its gradients would not be summed.

        Raises:
            UserError: always.
        """
        raise UserError("add_param_group was called on a prepared optimizer; add the group before prepare.")

    def state_dict(self) -> dict[str, Any]:
        """As the original's on one process: of whole tensors. Collective where the state is sharded."""
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
    """What `prepare` returns for a learning-rate schedule: it steps when the optimizer does, once per update.

    Attributes:
        scheduler: the original.
    """

    def __init__(self, scheduler: Any, sync: GradSync) -> None:
        self.scheduler, self.sync = scheduler, sync

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, unless gradients are being accumulated or the update was skipped for an overflow in fp16."""
        if self.sync.is_accumulating or self.sync.overflowed:
            return
        self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not set yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def require_matches(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], sharded: bool) -> None:
    """Check that an optimizer is one of a model's parameters.

    Args:
        parameters: of the model, before it was sharded.
        sharded: whether they are sharded, so that the optimizer must not have a state yet.

    Raises:
        UserError: it is not.
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
    """Whether a state has a value for each element of a weight of this shape."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == shape

"""Optimizers of parallel models in custom training loops (`distributed_optimizer`)."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from threefold.api.checkpoint import LoopModel, LoopOptimizer
from threefold.api.model import DistributedModel
from threefold.errors import UserError
from threefold.parallel.parameter import ShardedMatrix
from threefold.train.optim import Entry
from threefold.train.optimizers import UpdatedWeights


class ModelOptimizer(LoopOptimizer, torch.optim.Optimizer):
    """One or several optimizers over this rank's shards of a model, with the exact global gradient norm.

    Made by `distributed_optimizer`. If an optimizer needs whole weights, its groups contain whole weights instead of
    shards. It is not initialised as a `torch.optim.Optimizer`: parameters, state and hooks are those of `optimizers`.

    Attributes:
        optimizers: the torch optimizers; their `param_groups` have the learning rates, for schedulers of `torch.optim`.
        model: model that they update.
        entries: trained shards with their gradients.
        grad_norm: global gradient norm of the last step before clipping; None before the first step.
        step_was_skipped: whether the last step updated nothing because fp16 gradients overflowed.
    """

    made_by = "distributed_optimizer"

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        model: DistributedModel,
        clip_grad_norm: float | None = None,
    ) -> None:
        self.optimizers, self.model, self.clip_grad_norm = tuple(optimizers), model, clip_grad_norm
        self.grad_norm: float | None = None
        self.step_was_skipped = False
        step = model.gradient_step
        self._pairs: list[tuple[torch.optim.Optimizer, UpdatedWeights]] = []
        self._of: dict[str, tuple[torch.optim.Optimizer, UpdatedWeights]] = {}
        found: dict[str, Entry] = {}
        for optimizer in self.optimizers:
            updated_here, gathers = {id(each) for each in _parameters(optimizer)}, needs_whole_weights(optimizer)
            entries: dict[int, Entry] = {}
            for weight in step.model.trained:
                if id(weight.master) in updated_here:
                    matrix = ShardedMatrix(weight.parameter, step.parallelism.sharding_axes, every_dim=gathers)
                    entry = Entry(weight.name, weight.parameter, weight.leaf, weight.master, step.gradients, matrix)
                    entries[id(weight.master)] = found[weight.name] = entry
            updated = UpdatedWeights(list(entries.values()), gathers)
            for group in optimizer.param_groups:
                group["params"] = [
                    updated.of(entries[id(each)]) if id(each) in entries else each  # a frozen one, without a gradient
                    for each in group["params"]
                ]
            self._pairs.append((optimizer, updated))
            self._of |= dict.fromkeys((entry.name for entry in entries.values()), self._pairs[-1])
        self.entries = [found[weight.name] for weight in step.model.trained]
        self._seen = model.publications

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first optimizer, usually the only one."""
        return self.optimizers[0]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of all torch optimizers, for schedules of `torch.optim.lr_scheduler`."""
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Default options of the first optimizer."""
        return self.optimizer.defaults

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """State of all torch optimizers, by this rank's shards of the weights."""
        return {weight: state for each in self.optimizers for weight, state in each.state.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.optimizers))})"

    def state_dict(self) -> dict[str, Any]:
        """Raise UserError: a rank has only its shards of the state, which `threefold.save` saves for any layout."""
        raise UserError(
            "state_dict was called on a distributed optimizer, whose state is sharded; use threefold.save(folder, "
            "step, model=model, optimizer=optimizer)."
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise UserError: a rank has only its shards of the state, which `threefold.load` loads in any layout."""
        raise UserError(
            "load_state_dict was called on a distributed optimizer, whose state is sharded; use "
            "threefold.load(folder, model=model, optimizer=optimizer)."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UserError: the weights of an added group would not be updated."""
        raise UserError(
            "add_param_group was called on a distributed optimizer; add the group before distributed_optimizer."
        )

    def step(self, closure: None = None) -> float:  # type: ignore[override]
        """Clip the gradients by their global norm and update the weights. Collective over the world.

        If fp16 gradients overflow, nothing is updated on any rank and the loss scale is halved.

        Returns:
            the global gradient norm before clipping, the same float on every rank.

        Raises:
            UserError: there are no gradients, or they are not finite and no smaller loss scale could help; nothing is
                updated then, on any rank.
        """
        if closure is not None:
            raise UserError(
                "optimizer.step was given a closure, which it cannot run; call model.train_batch(batch, loss_fn) and "
                "then step()."
            )
        if not self.model.has_gradients:
            raise UserError(
                "optimizer.step() is called without gradients; call model.train_batch(batch, loss_fn) first."
            )
        model, step = self.model, self.model.gradient_step
        norm = float(step.squared_norm().item()) ** 0.5
        lr = self.param_groups[0].get("lr", 0)
        ending = step.end(norm, self.clip_grad_norm, self._update)
        if not ending.goes_on:
            raise UserError(
                f"The gradient norm of update {model.updates + 1} is {norm:g}; lower the learning rate "
                f"({lr:g}), to {lr / 2:g} say."
            )
        self.grad_norm, self.step_was_skipped = norm, not ending.updates
        model.updates += 1
        model.has_gradients = False
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients; each step does so by itself."""
        self.model.has_gradients = False

    def is_of(self, model: LoopModel) -> bool:
        return self.model is model

    def parts(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        return ((entry.name, entry.parameter, entry.master) for entry in self.entries)

    def states(self) -> Iterator[tuple[str, str, Any, Tensor]]:
        for entry in self.entries:
            optimizer, updated = self._of[entry.name]
            for name, value in optimizer.state.get(updated.of(entry), {}).items():
                if value is None:
                    continue
                tensor = torch.as_tensor(value)
                part = updated.shard_of_state(entry, tensor)
                whole = part if updated.is_replicated(entry, tensor.shape) else entry.stored(part)
                yield entry.name, name, value, whole

    def fill_states(self, shards: Mapping[str, Mapping[str, Tensor]], others: Mapping[str, Mapping[str, Any]]) -> None:
        for entry in self.entries:
            optimizer, updated = self._of[entry.name]
            weight = updated.of(entry)
            parts = shards[entry.name].items()
            whole = {name: updated.whole_state(entry, part, weight.shape) for name, part in parts}
            optimizer.state[weight] = {**whole, **others[entry.name]}

    def _update(self) -> None:
        changed = self._seen != self.model.publications
        for optimizer, updated in self._pairs:
            if changed:
                updated.gather_again()
            updated.step(optimizer)
        self.model.publish()
        self._seen = self.model.publications


def distributed_optimizer(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    model: DistributedModel,
    *,
    clip_grad_norm: float | None = None,
) -> ModelOptimizer:
    """Wrap an optimizer of `model.parameters()` to update the whole model.

    For a model from `threefold.parallelize`. (Not to be confused with Horovod's `DistributedOptimizer`, in
    `threefold.compat.horovod`, which sums the gradients of a plain module whose loop calls `loss.backward()`.)

    The optimizer updates this rank's shards, so it must treat elements independently, as SGD, Adam, AdamW and Lion do.
    `torch.optim.Muon`, `torch.optim.Adafactor` and classes with the attribute `needs_whole_matrices = True` get whole
    weights instead: every rank that holds a shard of a weight has all of it, with its state, and makes the same update.

    Args:
        optimizer: optimizer of all `model.parameters()`, in any groups (frozen ones may be left out); or several, each
            of some of them, such as Muon for the matrices and AdamW for the rest.
        model: model from `parallelize`.
        clip_grad_norm: maximum global gradient norm over all ranks; None for no clipping.

    Returns:
        an optimizer with `step()` and `zero_grad()`; its `optimizers` are the arguments, for learning-rate schedulers.

    Raises:
        UserError: the optimizer has parameters of another model or lacks some, or needs a closure that computes the
            loss.

    Example:
        >>> optimizer = threefold.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model)
        >>> matrices = [p for p in model.parameters() if p.dim() == 2]
        >>> others = [p for p in model.parameters() if p.dim() != 2]
        >>> both = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4)]
        >>> optimizer = threefold.distributed_optimizer(both, model, clip_grad_norm=1.0)
    """
    if not isinstance(model, DistributedModel):
        raise UserError(f"model is a {type(model).__name__} but must be one of threefold.parallelize(); give that.")
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) and optimizer else [optimizer]
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise UserError(
                f"optimizer is a {type(each).__name__} but must be a torch.optim.Optimizer of model.parameters(); "
                "make one."
            )
        name = type(each).__name__
        if isinstance(each, torch.optim.LBFGS):
            raise UserError(
                f"optimizer is {name}, which computes the loss several times in a step; use one that takes gradients, "
                "such as AdamW."
            )
        if needs_whole_weights(each) and each.state:
            raise UserError(
                f"optimizer is {name}, which needs whole weights, and has a state of this rank's shards already; pass "
                "it before its first step."
            )
    _check_parameters(optimizers, model)
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise UserError(f"clip_grad_norm is {clip_grad_norm} but must be above 0; use None for no limit.")
    return ModelOptimizer(optimizers, model, clip_grad_norm)


def needs_whole_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's update of one element depends on other elements of the weight."""
    known = isinstance(optimizer, torch.optim.Muon | torch.optim.Adafactor)
    return known or bool(getattr(optimizer, "needs_whole_matrices", False))


def _check_parameters(optimizers: Sequence[torch.optim.Optimizer], model: DistributedModel) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    given = Counter(id(parameter) for each in optimizers for parameter in _parameters(each))
    foreign = given.keys() - names.keys()
    if foreign:
        raise UserError(
            f"optimizer has {len(foreign)} parameters that are none of the model's; make it of model.parameters()."
        )
    trained = {id(weight.master) for weight in model.gradient_step.model.trained}
    left = [name for known, name in names.items() if known in trained and known not in given]
    if left:
        raise UserError(
            f"optimizer lacks {len(left)} of the model's parameters, such as {left[0]!r}; make it of all of "
            "model.parameters()."
        )
    twice = [names[each] for each, count in given.items() if count > 1]
    if twice:
        raise UserError(f"Two optimizers have the parameter {min(twice)!r}; leave it to one of them.")


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

"""Any `torch.optim.Optimizer` over the shards of a model (`distributed_optimizer`)."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from threefold.api.model import DistributedModel
from threefold.errors import UserError
from threefold.parallel.parameter import ShardedMatrix
from threefold.train.optim import Entry
from threefold.train.optimizers import UpdatedWeights
from threefold.train.step import GradientNorm, clip_and_update


class ModelOptimizer:
    """One or several optimizers over this rank's shards of a model, with the exact global gradient norm.

    Made by `distributed_optimizer`. The groups of an optimizer that needs whole weights contain these in place of the
    shards.

    Attributes:
        optimizers: the torch optimizers; their `param_groups` have the learning rates, for schedulers of `torch.optim`.
        model: model that they update.
        entries: trained shards with their gradients.
        grad_norm: global gradient norm of the last step before clipping; None before the first step.
        step_was_skipped: whether the last step updated nothing because fp16 gradients overflowed.
    """

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
        axes = step.parallelism.sharding_axes
        owner = {id(each): number for number, of in enumerate(self.optimizers) for each in _parameters(of)}
        whole = [needs_whole_weights(each) for each in self.optimizers]
        self.entries: list[Entry] = []
        self._optimizer_of: dict[str, int] = {}
        for weight in step.model.trained:
            number = owner[id(weight.master)]
            matrix = ShardedMatrix(weight.parameter, axes, every_dim=whole[number])
            entry = Entry(weight.name, weight.parameter, weight.leaf, weight.master, step.gradients, matrix)
            self.entries.append(entry)
            self._optimizer_of[entry.name] = number
        self._updated = [
            UpdatedWeights([each for each in self.entries if self._optimizer_of[each.name] == number], gathers)
            for number, gathers in enumerate(whole)
        ]
        entries = {id(entry.master): entry for entry in self.entries}
        for optimizer, updated in zip(self.optimizers, self._updated, strict=True):
            for group in optimizer.param_groups:
                group["params"] = [
                    updated.of(entries[id(each)]) if id(each) in entries else each  # a frozen one, without a gradient
                    for each in group["params"]
                ]
        self._norm = GradientNorm(step.gradients, self.entries, model.mesh, step.model.tied)
        self._seen = model.publications

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The first optimizer, usually the only one."""
        return self.optimizers[0]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all torch optimizers."""
        return [group for each in self.optimizers for group in each.param_groups]

    def step(self) -> float:
        """Clip the gradients by their global norm and update the weights. Collective over the world.

        If fp16 gradients overflow, nothing is updated on any rank and the loss scale is halved.

        Returns:
            the global gradient norm before clipping, the same float on every rank.

        Raises:
            UserError: there are no gradients, or they are not finite and no smaller loss scale could help; nothing is
                updated then, on any rank.
        """
        if not self.model.has_gradients:
            raise UserError(
                "optimizer.step() is called without gradients; call model.train_batch(batch, loss_fn) first."
            )
        model, step = self.model, self.model.gradient_step
        # Equal on every rank, which therefore all decide alike.
        norm = float(model.mesh.world.all_reduce_(self._norm.squared_or_overflow().view(1)).item()) ** 0.5
        lr = self.param_groups[0].get("lr", 0)
        clip_and_update(
            step.gradients,
            norm,
            self.clip_grad_norm,
            self._update,
            finite=isfinite(norm),
            scale=step.loss_scale,
            undo=step.buffers.undo,
            diverged=lambda: UserError(
                f"The gradient norm of update {model.updates + 1} is {norm:g}; lower the learning rate "
                f"({lr:g}), to {lr / 2:g} say."
            ),
        )
        self.grad_norm, self.step_was_skipped = norm, not isfinite(norm)
        model.updated()
        return norm

    def zero_grad(self) -> None:
        """Discard the gradients; each step does so by itself."""
        self.model.drop_gradients()

    def states(self, entry: Entry) -> Iterator[tuple[str, Any, Tensor]]:
        """Yield the optimizer state of a weight: its name, the optimizer's value, and a global tensor of the value."""
        number = self._optimizer_of[entry.name]
        updated = self._updated[number]
        for name, value in self.optimizers[number].state.get(updated.of(entry), {}).items():
            if value is None:
                continue
            tensor = torch.as_tensor(value)
            part = updated.shard_of_state(entry, tensor)
            yield name, value, part if updated.is_replicated(entry, tensor.shape) else entry.stored(part)

    def fill_state(self, entry: Entry, parts: Mapping[str, Tensor], others: Mapping[str, Any]) -> None:
        """Set the optimizer state of a weight. Collective over the axes that shard it.

        Args:
            entry: entry of the weight.
            parts: this rank's part of each state that has the weight's shape.
            others: numbers, and tensors that are equal on all ranks.
        """
        number = self._optimizer_of[entry.name]
        updated = self._updated[number]
        shape = updated.of(entry).shape
        self.optimizers[number].state[updated.of(entry)] = {
            **{name: updated.whole_state(entry, part, shape) for name, part in parts.items()},
            **others,
        }

    def _update(self) -> None:
        changed = self._seen != self.model.publications
        for optimizer, updated in zip(self.optimizers, self._updated, strict=True):
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
        UserError: the optimizer has parameters of another model or lacks some, or needs the loss as a function.

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
        _check_kind(each)
    _check_parameters(optimizers, model)
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise UserError(f"clip_grad_norm is {clip_grad_norm} but must be above 0; use None for no limit.")
    return ModelOptimizer(optimizers, model, clip_grad_norm)


def needs_whole_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer computes an element's update from other elements of the weight."""
    known = isinstance(optimizer, torch.optim.Muon | torch.optim.Adafactor)
    return known or bool(getattr(optimizer, "needs_whole_matrices", False))


def _check_kind(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(
            f"optimizer is {name}, which computes the loss several times in a step; use one that takes gradients, such "
            "as AdamW."
        )
    if needs_whole_weights(optimizer) and optimizer.state:
        raise UserError(
            f"optimizer is {name}, which needs whole weights, and has a state of this rank's shards already; pass it "
            "before its first step."
        )


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

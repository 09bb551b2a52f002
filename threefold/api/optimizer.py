"""`distributed_optimizer`: any `torch.optim.Optimizer` over the shards of a model."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from threefold.api.model import DistributedModel
from threefold.errors import UserError
from threefold.parallel.matrices import ShardedMatrix
from threefold.train.gradient_norm import local_squared_norm, overflow
from threefold.train.optimizers.base import Entry

_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class ModelOptimizer:
    """An optimizer over this rank's shards of a model, with the exact global gradient norm.

    Made by `distributed_optimizer`.

    Attributes:
        optimizer: torch's own; its `param_groups` have the learning rates, for schedulers of `torch.optim`.
        model: whose shards it updates.
        entries: the shards, with their gradients.
        grad_norm: global norm of the gradients of the last step, before they were clipped; None before it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: DistributedModel, clip_grad_norm: float | None = None
    ) -> None:
        self.optimizer, self.model, self.clip_grad_norm = optimizer, model, clip_grad_norm
        self.grad_norm: float | None = None
        step = model.gradient_step
        axes = tuple(step.parallelism.sharding_axes)
        self.entries = [
            Entry(
                weight.name,
                weight.parameter,
                weight.leaf,
                weight.master,
                step.gradients,
                ShardedMatrix(weight.parameter, axes),
            )
            for weight in step.model.weights
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of torch's optimizer."""
        return self.optimizer.param_groups

    def step(self) -> float:
        """Clip the gradients by their global norm and update the weights. Collective over the world.

        Returns:
            the global norm of the gradients before they were clipped, the same float on every rank.

        Raises:
            UserError: there are no gradients, or they are not finite; nothing is updated then, on any rank.
        """
        if not self.model.has_gradients:
            raise UserError(
                "optimizer.step() is called without gradients; call model.train_batch(batch, loss_fn) first."
            )
        step = self.model.gradient_step
        total = local_squared_norm(step.model, self.entries) + overflow(self.entries)
        norm = float(self.model.mesh.world.all_reduce_(total.view(1)).item()) ** 0.5
        if not isfinite(norm):
            raise UserError(
                f"The gradient norm of update {self.model.updates + 1} is {norm:g}; lower the learning rate "
                f"({self.param_groups[0].get('lr', 0):g}), to {self.param_groups[0].get('lr', 0) / 2:g} say."
            )
        self.grad_norm = norm
        if self.clip_grad_norm and (coefficient := self.clip_grad_norm / (norm + _CLIP_EPS)) < 1:
            step.gradients.scale_(coefficient)
        for entry in self.entries:
            entry.master.grad = entry.gradient
        self.optimizer.step()
        self.model.publish()
        self.model.updated()
        return norm

    def zero_grad(self) -> None:
        """Drop the gradients; each step does so by itself."""
        self.model.drop_gradients()

    def states(self, entry: Entry) -> Mapping[str, Tensor]:
        """The optimizer state of a shard, by name: tensors of its shape, and scalars."""
        found = self.optimizer.state.get(entry.master, {})
        return {name: torch.as_tensor(value) for name, value in found.items() if value is not None}


def distributed_optimizer(
    optimizer: torch.optim.Optimizer, model: DistributedModel, *, clip_grad_norm: float | None = None
) -> ModelOptimizer:
    """Make an optimizer of `model.parameters()` one of the whole model.

    It updates local shards, so it has to treat elements independently of each other, as SGD, Adam, AdamW and Lion do.

    Args:
        optimizer: over all of `model.parameters()`, in any groups.
        model: of `parallelize`.
        clip_grad_norm: largest global norm of the gradient over all ranks; None for no limit.

    Returns:
        an object with `step()` and `zero_grad()`; its `optimizer` is the argument, for learning-rate schedulers.

    Raises:
        UserError: the optimizer has other parameters, or needs whole weights or the loss as a function.

    Example:
        >>> optimizer = threefold.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model)
    """
    if not isinstance(model, DistributedModel):
        raise UserError(f"model is a {type(model).__name__} but must be one of threefold.parallelize(); give that.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer is a {type(optimizer).__name__} but must be a torch.optim.Optimizer of model.parameters(); "
            "make one."
        )
    _check_kind(optimizer)
    _check_parameters(optimizer, model)
    if clip_grad_norm is not None and not clip_grad_norm > 0:
        raise UserError(f"clip_grad_norm is {clip_grad_norm} but must be above 0; use None for no limit.")
    return ModelOptimizer(optimizer, model, clip_grad_norm)


def _check_kind(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(
            f"optimizer is {name}, which computes the loss several times in a step; use one that takes gradients, such "
            "as AdamW."
        )
    if isinstance(optimizer, torch.optim.Muon | torch.optim.Adafactor) or getattr(
        optimizer, "needs_whole_matrices", False
    ):
        raise UserError(
            f"optimizer is {name}, which needs whole weights, and parameters() has this rank's shards; use an "
            "elementwise one, such as AdamW, or threefold.Trainer, which gathers them."
        )


def _check_parameters(optimizer: torch.optim.Optimizer, model: DistributedModel) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if given - names.keys():
        raise UserError(
            f"optimizer has {len(given - names.keys())} parameters that are none of the model's; make it of "
            "model.parameters()."
        )
    left = [name for known, name in names.items() if known not in given]
    if left:
        raise UserError(
            f"optimizer lacks {len(left)} of the model's parameters, such as {left[0]!r}; make it of all of "
            "model.parameters()."
        )

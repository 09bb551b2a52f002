"""The update: torch's fused optimizers over plain local tensors, with wide master weights where the model is narrow."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.config import OptimizerConfig
from threefold.models.sharding import ModelPlan
from threefold.parallel.data.grad_buckets import Gradients
from threefold.parallel.parallelize import draw_
from threefold.parallel.parameter import like, local


@dataclass(frozen=True)
class Entry:
    """One parameter as the optimizer sees it.

    Attributes:
        name: its name in the whole model.
        parameter: as the stage stores it.
        leaf: what the model computes with (the local shard).
        master: what is updated, of the leaf's shape; the leaf itself where the model is wide enough.
        gradients: where its gradient is.
    """

    name: str
    parameter: Tensor
    leaf: Tensor
    master: Tensor
    gradients: Gradients

    @property
    def gradient(self) -> Tensor:
        """In the master's dtype, of its shape."""
        return self.gradients[self.leaf]

    def stored(self, shard: Tensor) -> Tensor:
        """A tensor of the local shape as a global one, the way the parameter is stored."""
        return like(self.parameter, shard)


class Optimizer:
    """Updates a rank's parameters.

    Weights of two dims or more decay; biases and norms do not (by kind, never by name).

    Args:
        parameters: each with its name in the whole model.
        gradients: theirs.
        dtype: what weights are updated in, and their gradients are.
        config: which optimizer, and its constants.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        gradients: Gradients,
        dtype: torch.dtype,
        config: OptimizerConfig,
    ) -> None:
        self.entries = [_entry(name, parameter, gradients, dtype) for name, parameter in parameters]
        self._gradients = gradients
        self._narrow = [entry for entry in self.entries if entry.master is not entry.leaf]
        self._torch = _make(self.entries, config)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update with learning rate `lr`."""
        for group in self._torch.param_groups:
            group["lr"] = lr
        for entry in self.entries:
            entry.master.grad = entry.gradient
        self._torch.step()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the tensors that the model computes with."""
        self._gradients.weights_changed()
        if self._narrow:
            torch._foreach_copy_([entry.leaf.detach() for entry in self._narrow], [e.master for e in self._narrow])

    def initialise(self, plan: ModelPlan, seed: int) -> None:
        """Set masters and model to the initial weights of `seed`, the masters at their full width."""
        for entry in self.entries:
            draw_(entry.master, entry.parameter, entry.name, plan, seed)
        self.publish()

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """The optimizer's memory: parameter name, state name, local tensor (scalars are the same on every rank)."""
        for entry in self.entries:
            for state, value in self._torch.state[entry.master].items():
                yield entry.name, state, value


def _entry(name: str, parameter: Tensor, gradients: Gradients, dtype: torch.dtype) -> Entry:
    leaf = local(parameter)
    master = leaf if leaf.dtype == dtype else leaf.detach().to(dtype).requires_grad_()
    return Entry(name, parameter, leaf, master, gradients)


def _make(entries: list[Entry], config: OptimizerConfig) -> torch.optim.Optimizer:
    decayed = [entry.master for entry in entries if entry.parameter.dim() >= 2]
    plain = [entry.master for entry in entries if entry.parameter.dim() < 2]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, config.weight_decay), (plain, 0.0))
        if params
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, fused=True)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    for entry in entries:
        # Made now instead of at the first step, so that a checkpoint finds the same states before and after it.
        optimizer.state[entry.master] = {
            "step": torch.zeros((), dtype=torch.float32, device=entry.master.device),
            "exp_avg": torch.zeros_like(entry.master, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(entry.master, requires_grad=False),
        }
    return optimizer

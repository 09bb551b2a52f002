"""The update of a rank's weights: the configured rule over local shards, with wide master weights where the model is
narrow."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from threefold.comm.axis import Axis
from threefold.config import OptimizerConfig
from threefold.config.optimizer import OPTIMIZERS
from threefold.models.sharding import ModelPlan
from threefold.parallel.data.grad_buckets import Gradients
from threefold.parallel.matrices import ShardedMatrix
from threefold.parallel.parallelize import draw_
from threefold.parallel.parameter import local
from threefold.train.optimizers.base import Entry, UpdateRule


class Optimizer:
    """Updates a rank's parameters.

    Args:
        parameters: each with its name in the whole model.
        gradients: theirs.
        dtype: what weights are updated in, and their gradients are.
        config: which optimizer, and its constants.
        plan: the model's layers; the weights between the first and the last are hidden.
        axes: those that may cut a parameter.

    Raises:
        UserError: the optimizer is another package's and cannot be imported.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        gradients: Gradients,
        dtype: torch.dtype,
        config: OptimizerConfig,
        plan: ModelPlan,
        axes: Iterable[Axis],
    ) -> None:
        axes, self._gradients = tuple(axes), gradients
        self.entries: list[Entry] = []
        for name, parameter in parameters:
            leaf = local(parameter)
            master = leaf if leaf.dtype == dtype else leaf.detach().to(dtype).requires_grad_()
            matrix = ShardedMatrix(parameter, axes) if is_hidden_matrix(name, parameter.dim(), plan) else None
            self.entries.append(Entry(name, parameter, leaf, master, gradients, matrix))
        self._narrow = [entry for entry in self.entries if entry.master is not entry.leaf]
        self.rule: UpdateRule = OPTIMIZERS.load(config.name)(self.entries, config)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update with learning rate `lr`."""
        self.rule.step(lr)
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
        """The optimizer state: parameter name, state name, local tensor (scalars are the same on every rank)."""
        for entry in self.entries:
            for state, value in self.rule.state(entry).items():
                yield entry.name, state, value


def is_hidden_matrix(name: str, dims: int, plan: ModelPlan) -> bool:
    """Whether a parameter is a weight of two dims or more of a layer between the model's first and its last.

    Args:
        name: in the whole model; a tied weight's is that of its first use.
        dims: how many it has.
        plan: the model's layers.
    """
    return dims >= 2 and any(name.startswith(f"{layer}.") for layer in plan.layers[1:-1])

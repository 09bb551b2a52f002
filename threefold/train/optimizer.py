"""The update of a rank's weights: the configured rule over local shards, with wide master weights where the model is
narrow."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from threefold.comm.axis import Axis
from threefold.config import OptimizerConfig
from threefold.models.sharding import ModelPlan
from threefold.parallel.data.grad_buckets import Gradients
from threefold.parallel.matrices import ShardedMatrix
from threefold.parallel.weights import Weight, publish_
from threefold.train.optimizers.base import Entry, UpdateRule
from threefold.train.optimizers.own import update_rule


class Optimizer:
    """Updates a rank's parameters.

    Args:
        weights: with their masters.
        gradients: theirs.
        config: which optimizer, and its constants.
        plan: the model's layers; the weights between the first and the last are hidden.
        axes: those that may cut a parameter.

    Attributes:
        entries: the weights that are trained.
        rule: the update of each.
        restorations: how often `restored` was called.

    Raises:
        UserError: the optimizer is another package's or the user's and cannot be imported or made.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        gradients: Gradients,
        config: OptimizerConfig,
        plan: ModelPlan,
        axes: Iterable[Axis],
    ) -> None:
        axes, self._weights, self._gradients = tuple(axes), weights, gradients
        self.entries: list[Entry] = []
        trained = [weight for weight in weights if weight.is_trained]
        for weight in trained:
            parameter = weight.parameter
            whole, hidden = ShardedMatrix(parameter, axes), plan.is_hidden_matrix(weight.name, parameter.dim())
            self.entries.append(Entry(weight.name, parameter, weight.leaf, weight.master, gradients, whole, hidden))
        self.rule: UpdateRule = update_rule(config)(self.entries, config)
        self.restorations = 0
        self._trained = trained

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update with learning rate `lr`."""
        self.rule.step(lr)
        publish_(self._trained, self._gradients)

    @torch.no_grad()
    def restored(self) -> None:
        """Take over masters, and tensors of `states`, that have been filled from a checkpoint."""
        self.rule.restored()
        publish_(self._weights, self._gradients)
        self.restorations += 1

    def stored_states(self) -> Iterator[tuple[str, str, Tensor]]:
        """As `states`, as global tensors for a checkpoint: sharded as the parameter is, or replicated."""
        for entry in self.entries:
            for state, value in self.rule.state(entry).items():
                yield entry.name, state, value if self.rule.is_replicated(entry, state, value) else entry.stored(value)

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """The optimizer state: parameter name, state name, local tensor (scalars are the same on every rank)."""
        for entry in self.entries:
            for state, value in self.rule.state(entry).items():
                yield entry.name, state, value

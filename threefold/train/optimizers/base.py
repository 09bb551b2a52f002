"""Optimizer interface: parameters, optimizer state and update rule."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from threefold.config import OptimizerConfig
from threefold.parallel.gradients import Gradients
from threefold.parallel.parameter import ShardedMatrix
from threefold.parallel.weights import Weight


@dataclass(frozen=True)
class Entry(Weight):
    """Weight of an optimizer.

    Attributes:
        gradients: gradients of all weights, including this one.
        whole: gathers the whole matrix or matrices (the last two dims of the parameter), or the whole vector.
        is_hidden: whether the weight has at least two dims and lies between the first and the last layer; False for
            embeddings, the head, norms and biases.
    """

    gradients: Gradients
    whole: ShardedMatrix
    is_hidden: bool = False

    @property
    def hidden_matrix(self) -> ShardedMatrix | None:
        """`whole` for a hidden matrix; None for all other weights."""
        return self.whole if self.is_hidden else None

    @property
    def gradient(self) -> Tensor:
        """Gradient of the weight, with the dtype and shape of the master."""
        return self.gradients[self.leaf]

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to weights of at least two dims, not to biases and norms."""
        return self.parameter.dim() >= 2


class UpdateRule(ABC):
    """Base class of optimizers: updates this rank's shards, given their complete gradients.

    Each optimizer is one subclass in a file of this folder or in another package. The update must be the same in every
    layout. This holds for a rule that treats elements independently; a rule that needs whole matrices gathers them
    through `Entry.hidden_matrix`.

    Args:
        entries: this rank's parameters, the same and in the same order on all ranks that shard them. A shard may be
            empty.
        config: resolved config.

    Attributes:
        reads: the `config.optimizer.HYPER_PARAMETERS` that it reads, with their defaults (None: the section's default).
            All others are refused. Built-in optimizers use `BUILT_IN` instead, which imports no torch.
    """

    reads: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig) -> None:
        self.entries, self.config = list(entries), config

    @abstractmethod
    def step(self, lr: float) -> None:
        """Update every entry's `master` in place from its `gradient` with learning rate `lr`.

        Called without autograd, in the same steps on all ranks.
        """

    @abstractmethod
    def state(self, entry: Entry) -> Mapping[str, Tensor]:
        """Return the optimizer state of an entry by name; it is saved in checkpoints and filled in place on resuming.

        Each tensor exists from the start. It either has the master's shape and is sharded like the parameter, or is a
        scalar that is the same on every rank.
        """

    def is_replicated(self, entry: Entry, state: str, value: Tensor) -> bool:
        """Return whether a tensor of `state` is equal on all ranks that hold the weight, not sharded like it."""
        return value.dim() == 0

    def restored(self) -> None:  # noqa: B027 - most have nothing to do
        """Handle masters and `state` tensors that were filled from a checkpoint or from initial weights."""

    @classmethod
    @abstractmethod
    def states_per_element(cls, config: OptimizerConfig, is_hidden_matrix: bool) -> int:
        """Return the number of state tensors of the weight's shape, for memory estimates."""

    def weight_decay(self, entry: Entry) -> float:
        """Return the weight decay of an entry: the setting, or 0."""
        return self.config.weight_decay if entry.decays else 0.0


class TorchRule(UpdateRule):
    """Base class of elementwise `torch.optim` optimizers over the plain local shards."""

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig) -> None:
        super().__init__(entries, config)
        decayed = [entry.master for entry in self.entries if entry.decays]
        others = [entry.master for entry in self.entries if not entry.decays]
        groups = ((decayed, config.weight_decay), (others, 0.0))
        given = [{"params": params, "weight_decay": decay} for params, decay in groups if params]
        self._torch = self.make(given) if given else None  # a rank may hold only frozen weights
        for entry in self.entries:
            # Create the state now, not in the first step, so that a checkpoint finds the same states before and after
            # it.
            self._of_torch.state[entry.master] = self.initial_state(entry.master)

    @abstractmethod
    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Construct torch's optimizer for parameter groups that specify their weight decay."""

    @abstractmethod
    def initial_state(self, master: Tensor) -> dict[str, Tensor]:
        """Return the optimizer state that torch's optimizer would create for a parameter in its first step."""

    def step(self, lr: float) -> None:
        if self._torch is None:
            return
        for group in self._torch.param_groups:
            group["lr"] = lr
        for entry in self.entries:
            entry.master.grad = entry.gradient
        self._torch.step()

    def state(self, entry: Entry) -> Mapping[str, Tensor]:
        found: Mapping[str, Tensor] = self._of_torch.state[entry.master]
        return found

    @property
    def _of_torch(self) -> torch.optim.Optimizer:
        assert self._torch is not None  # there is an entry
        return self._torch


def zeros(master: Tensor) -> Tensor:
    """Return a zero tensor of optimizer state with a master's shape."""
    return torch.zeros_like(master, requires_grad=False)


class UpdatedWeights:
    """Tensors that a `torch.optim.Optimizer` updates: masters, or whole weights if it needs them and they are sharded.

    Every rank that holds a shard of a gathered weight makes the same update of the whole, and keeps its shard of the
    result. This costs an all-gather of the gradient in each step, and, on each of these ranks, memory for the whole
    weight and its whole state. All methods are collective over the axes that shard the weights, in the same order on
    all ranks.
    """

    def __init__(self, entries: Sequence[Entry], gathers: bool) -> None:
        self._entries = list(entries)
        self._tensors: dict[str, Tensor] = {}
        for entry in self._entries:
            if not gathers or entry.whole.is_whole:
                self._tensors[entry.name] = entry.master
            else:
                self._tensors[entry.name] = entry.whole.gather(entry.master.detach()).clone().requires_grad_()

    def of(self, entry: Entry) -> Tensor:
        """Return the tensor that the optimizer updates for an entry."""
        return self._tensors[entry.name]

    def is_gathered(self, entry: Entry) -> bool:
        """Return whether the updated tensor is a whole weight that the layout shards."""
        return self.of(entry) is not entry.master

    def set_gradients(self) -> None:
        """Set the `grad` of each tensor."""
        for entry in self._entries:
            gradient = entry.gradient
            self.of(entry).grad = entry.whole.gather(gradient) if self.is_gathered(entry) else gradient

    @torch.no_grad()
    def keep_shards(self) -> None:
        """Update the masters from the whole weights, after an optimizer step."""
        for entry in self._entries:
            if self.is_gathered(entry):
                self.of(entry).grad = None
                entry.master.copy_(entry.whole.shard(self.of(entry), entry.master))

    @torch.no_grad()
    def gather_again(self) -> None:
        """Update the whole weights from the masters, after these were changed elsewhere."""
        for entry in self._entries:
            if self.is_gathered(entry):
                self.of(entry).detach().copy_(entry.whole.gather(entry.master.detach()))

    def is_replicated(self, entry: Entry, shape: torch.Size) -> bool:
        """Return whether a state of this shape is equal on all ranks that hold the weight, not sharded like it."""
        return shape != self.of(entry).shape

    def shard_of_state(self, entry: Entry, value: Tensor) -> Tensor:
        """Return this rank's shard of an optimizer state; all of it if it is replicated."""
        if not self.is_gathered(entry) or self.is_replicated(entry, value.shape):
            return value
        return entry.whole.shard(value, entry.master).contiguous()

    def whole_state(self, entry: Entry, part: Tensor, shape: torch.Size) -> Tensor:
        """Return an optimizer state of this shape from the shards of all ranks."""
        if not self.is_gathered(entry) or self.is_replicated(entry, shape):
            return part
        return entry.whole.gather(part).clone()

"""The interface of an optimizer: its parameters, its optimizer state, and its update rule."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from threefold.config import OptimizerConfig
from threefold.parallel.data.grad_buckets import Gradients
from threefold.parallel.matrices import ShardedMatrix
from threefold.parallel.weights import Weight


@dataclass(frozen=True)
class Entry(Weight):
    """One weight of an optimizer.

    Attributes:
        gradients: where its gradient is.
        whole: gathers the whole matrix or matrices (the last two dims of the parameter), or the whole vector.
        is_hidden: whether it is a weight of two dims or more of a layer between the model's first and its last; not for
            embeddings, the head, norms and biases.
    """

    gradients: Gradients
    whole: ShardedMatrix
    is_hidden: bool = False

    @property
    def hidden_matrix(self) -> ShardedMatrix | None:
        """`whole` of a hidden matrix; None for the other weights."""
        return self.whole if self.is_hidden else None

    @property
    def gradient(self) -> Tensor:
        """In the master's dtype, of its shape."""
        return self.gradients[self.leaf]

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to weights of two dims or more, not to biases and norms."""
        return self.parameter.dim() >= 2


class UpdateRule(ABC):
    """How an optimizer updates this rank's shards, given their complete gradients: what one file of this folder, or of
    another package, defines.

    The update has to be the same in every layout. One that treats elements independently is; one that needs whole
    matrices gathers them through `Entry.hidden_matrix`.

    Args:
        entries: this rank's parameters, the same and in the same order on all ranks that shard them. A shard may be
            empty.
        config: resolved.

    Attributes:
        reads: which of `config.optimizer.HYPER_PARAMETERS` it reads, and their defaults (None: as the section says).
            The others are refused. The package's own are in `BUILT_IN` instead, which imports no torch.
    """

    reads: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig) -> None:
        self.entries, self.config = list(entries), config

    @abstractmethod
    def step(self, lr: float) -> None:
        """Update every entry's `master` in place from its `gradient`, with learning rate `lr`. Called without autograd;
        all ranks call it in the same steps."""

    @abstractmethod
    def state(self, entry: Entry) -> Mapping[str, Tensor]:
        """The optimizer state of an entry by name, saved in checkpoints and filled in place on resuming.

        Each tensor exists from the start. It has the master's shape and is sharded as the parameter is, or is a scalar,
        the same on every rank.
        """

    def is_replicated(self, entry: Entry, state: str, value: Tensor) -> bool:
        """Whether a tensor of `state` is the same on all ranks that have the weight, rather than sharded as it is."""
        return value.dim() == 0

    def restored(self) -> None:  # noqa: B027 - most have nothing to do
        """The masters, and the tensors of `state`, have been filled from a checkpoint or from initial weights."""

    @classmethod
    @abstractmethod
    def states_per_element(cls, config: OptimizerConfig, is_hidden_matrix: bool) -> int:
        """How many tensors of optimizer state, of a weight's shape, it needs, for estimates of memory."""

    def weight_decay(self, entry: Entry) -> float:
        """That of an entry: the setting, or 0."""
        return self.config.weight_decay if entry.decays else 0.0


class TorchRule(UpdateRule):
    """An elementwise optimizer of `torch.optim`, over the plain local shards."""

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig) -> None:
        super().__init__(entries, config)
        decayed = [entry.master for entry in self.entries if entry.decays]
        others = [entry.master for entry in self.entries if not entry.decays]
        groups = ((decayed, config.weight_decay), (others, 0.0))
        given = [{"params": params, "weight_decay": decay} for params, decay in groups if params]
        self._torch = self.make(given) if given else None  # a rank may hold frozen weights alone
        for entry in self.entries:
            # Made now instead of at the first step, so that a checkpoint finds the same states before and after it.
            self._of_torch.state[entry.master] = self.initial_state(entry.master)

    @abstractmethod
    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Torch's optimizer for parameter groups that name their weight decay."""

    @abstractmethod
    def initial_state(self, master: Tensor) -> dict[str, Tensor]:
        """The optimizer state that torch's optimizer would make for a parameter at its first step."""

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
    """A tensor of optimizer state, of a master's shape."""
    return torch.zeros_like(master, requires_grad=False)

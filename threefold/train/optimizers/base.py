"""The interface of an optimizer: its parameters, its optimizer state, and its update rule."""

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


class UpdatedWeights:
    """What a `torch.optim.Optimizer` updates for each entry: its master, or the whole weight where the optimizer needs
    that and the layout cuts it.

    Every rank that holds a shard of a gathered weight makes the same update of the whole, and keeps its shard of the
    result. That costs an all-gather of the gradient in each step, and on each of these ranks the memory of the whole
    weight and of its whole state.

    Collective over the axes that cut the weights, as its methods: all ranks call them in the same order.

    Args:
        entries: this rank's weights.
        gathers: whether the optimizer needs whole weights.
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
        """What the optimizer updates for an entry."""
        return self._tensors[entry.name]

    def is_gathered(self, entry: Entry) -> bool:
        """Whether that is a whole weight that the layout cuts."""
        return self.of(entry) is not entry.master

    def set_gradients(self) -> None:
        """Give each tensor its gradient."""
        for entry in self._entries:
            gradient = entry.gradient
            self.of(entry).grad = entry.whole.gather(gradient) if self.is_gathered(entry) else gradient

    @torch.no_grad()
    def keep_shards(self) -> None:
        """Set the masters from the whole weights, after the optimizer has updated these."""
        for entry in self._entries:
            if self.is_gathered(entry):
                self.of(entry).grad = None
                entry.master.copy_(entry.whole.shard(self.of(entry), entry.master))

    @torch.no_grad()
    def gather_again(self) -> None:
        """Set the whole weights from the masters, after something else has changed these."""
        for entry in self._entries:
            if self.is_gathered(entry):
                self.of(entry).detach().copy_(entry.whole.gather(entry.master.detach()))

    def is_replicated(self, entry: Entry, shape: torch.Size) -> bool:
        """Whether a state that the optimizer keeps in this shape is the same on all ranks that have the weight, rather
        than sharded as it is."""
        return shape != self.of(entry).shape

    def shard_of_state(self, entry: Entry, value: Tensor) -> Tensor:
        """This rank's part of a state that the optimizer keeps; all of it where it is replicated."""
        if not self.is_gathered(entry) or self.is_replicated(entry, value.shape):
            return value
        return entry.whole.shard(value, entry.master).contiguous()

    def whole_state(self, entry: Entry, part: Tensor, shape: torch.Size) -> Tensor:
        """A state as the optimizer keeps it, in this shape, from each rank's part."""
        if not self.is_gathered(entry) or self.is_replicated(entry, shape):
            return part
        return entry.whole.gather(part).clone()

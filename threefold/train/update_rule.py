"""Base of all optimizers: the weights of an update, the rule that makes it, and the loss scale of fp16."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from threefold.config import OptimizerConfig, PrecisionConfig
from threefold.config.optimizer import BUILT_IN
from threefold.ops.arithmetic import PLAIN, LayerArithmetic
from threefold.parallel.gradients import Gradients
from threefold.parallel.parameter import ShardedMatrix, Weight


@dataclass(frozen=True)
class Entry(Weight):
    """Weight of an optimizer.

    Attributes:
        gradients: gradients of all weights, including this one.
        whole: gathers the whole matrix or matrices (the last two dims of the parameter), or the whole vector.
        is_hidden: whether the weight has at least two dims and lies between the first and the last layer; False for
            embeddings, the head, norms and biases.
        arithmetic: how an update multiplies whole matrices, and whether it may use fused kernels.
    """

    gradients: Gradients
    whole: ShardedMatrix
    is_hidden: bool = False
    arithmetic: LayerArithmetic = PLAIN

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

    The update must be the same in every layout. This holds for a rule that treats elements independently; a rule that
    needs whole matrices gathers them through `Entry.whole`. Entries are the same and in the same order on all ranks
    that shard them; a shard may be empty.

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
    def states_per_element(cls, config: OptimizerConfig, is_hidden_matrix: bool) -> int:
        """Return the number of state tensors of the weight's shape, for memory estimates.

        An optimizer of another package must define it; `BUILT_IN` has those of the others.
        """
        return BUILT_IN[config.name].states(config, is_hidden_matrix)

    def weight_decay(self, entry: Entry) -> float:
        return self.config.weight_decay if entry.decays else 0.0


LEAST = 1.0  # smallest loss scale; gradients that overflow at this scale also overflow unscaled


class LossScale:
    """Dynamic loss scale of fp16 training; equal on every rank, as all ranks see the same gradient norm.

    Small gradients vanish below fp16's smallest number, 6e-8. The loss is therefore multiplied by a large factor before
    the backward pass, and the gradients are divided by it afterwards (Micikevicius et al., "Mixed precision training",
    arXiv 1710.03740, section 3.2). The scale, a power of two so that this is exact, halves when the gradients overflow,
    and doubles after `window` steps without an overflow, counted by `good_steps`.
    """

    def __init__(self, initial: float, window: int) -> None:
        self.window = window
        self.value, self.good_steps = initial, 0

    @classmethod
    def of(cls, config: PrecisionConfig) -> "LossScale | None":
        """Return the loss scale that a config asks for; None unless the dtype is fp16."""
        return cls(config.loss_scale, config.loss_scale_window) if config.dtype == "fp16" else None

    @property
    def is_least(self) -> bool:
        return self.value <= LEAST

    def update(self, finite: bool) -> None:
        """Count a step whose gradients are finite and double the scale after `window` of them, or halve it."""
        self.good_steps += 1
        if not finite:
            self.value, self.good_steps = max(LEAST, self.value / 2), 0
        elif self.good_steps == self.window:
            self.value, self.good_steps = self.value * 2, 0

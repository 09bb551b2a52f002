"""The update of a rank's weights: the base of optimizers, AdamW, and the learning-rate schedules.

An optimizer is one `UpdateRule`: AdamW and Adam below, the others in `train/optimizers.py` or in another package. A
learning-rate schedule is one function, below or in another package. `config.optimizer` has a row for each.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import cos, pi
from typing import Any, ClassVar

import torch
from torch import Tensor

from threefold.comm.axis import Axis
from threefold.config import OptimizerConfig
from threefold.config.optimizer import BUILT_IN, LR_SCHEDULES
from threefold.models.sharding import ModelPlan
from threefold.models.widths import Role, role_of
from threefold.ops.arithmetic import PLAIN, LayerArithmetic
from threefold.parallel.gradients import Gradients
from threefold.parallel.parameter import ShardedMatrix, Weight, publish_
from threefold.torch_private.tensors import fused_adam_
from threefold.train.average import WeightAverage


@dataclass(frozen=True)
class Entry(Weight):
    """Weight of an optimizer.

    Attributes:
        gradients: gradients of all weights, including this one.
        whole: gathers the whole matrix or matrices (the last two dims of the parameter), or the whole vector.
        is_hidden: whether the weight has at least two dims and lies between the first and the last layer; False for
            embeddings, the head, norms and biases.
        arithmetic: how an update multiplies whole matrices, and whether it may use fused kernels.
        is_stack: whether its first dim counts experts, each with a matrix or a vector of its own.
        all_decay: whether it decays even if it is a bias or a norm.
        role, width: which of its dims grow with the model's width, and `ModelPlan.width`, for µP.
    """

    gradients: Gradients
    whole: ShardedMatrix
    is_hidden: bool = False
    arithmetic: LayerArithmetic = PLAIN
    is_stack: bool = False
    all_decay: bool = False
    role: Role = "fixed"
    width: float = 1.0

    @property
    def gradient(self) -> Tensor:
        """Gradient of the weight, with the dtype and shape of the master."""
        return self.gradients[self.leaf]

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to weights of at least two dims, not to biases and norms, unless asked for."""
        return self.all_decay or self.parameter.dim() - self.is_stack >= 2


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

    def lr_scale(self, entry: Entry) -> float:
        """Return the factor on the learning rate of an entry."""
        return 1.0


class Optimizer:
    """Optimizer of one rank's parameters.

    Args:
        plan: layers of the model; the weights between the first and the last layer are hidden.
        axes: mesh axes that may shard a parameter.
        arithmetic: how an update multiplies whole matrices.

    Attributes:
        entries: the trained weights.
        average: moving average of the weights; None without `ema_decay`.
        restorations: number of calls of `restored`.
    """

    def __init__(
        self,
        rule: type[UpdateRule],
        weights: Sequence[Weight],
        gradients: Gradients,
        config: OptimizerConfig,
        plan: ModelPlan,
        axes: Iterable[Axis],
        arithmetic: LayerArithmetic = PLAIN,
    ) -> None:
        axes, self._weights, self._gradients = tuple(axes), weights, gradients
        trained = [weight for weight in weights if weight.is_trained]
        self.entries: list[Entry] = []
        for weight in trained:
            parameter = weight.parameter
            whole, hidden = ShardedMatrix(parameter, axes), plan.is_hidden_matrix(weight.name, parameter.dim())
            fields = weight.name, parameter, weight.leaf, weight.master
            kind = plan.is_stack(weight.name), False, role_of(weight.name), plan.width
            self.entries.append(Entry(*fields, gradients, whole, hidden, arithmetic, *kind))
        self._narrow = [weight for weight in trained if weight.master is not weight.leaf]
        self.rule = rule(self.entries, config)
        self.average = WeightAverage(self.entries, config) if config.ema_decay else None
        self.restorations = 0

    @torch.no_grad()
    def step(self, lr: float, update: int = 0) -> None:
        """Make an update; its number, 1 for the first, decides how the average of the weights takes it in."""
        self.rule.step(lr)
        if self.average is not None:
            self.average.update(update)
        if self._narrow:
            publish_(self._narrow, self._gradients)
        else:
            self._gradients.weights_changed()

    @torch.no_grad()
    def restored(self, averages: Collection[str] | None = None) -> None:
        """Take over the masters and the tensors of `states` after a checkpoint has filled them.

        The averages of weights that are not in `averages` (None for all) start from the weights.
        """
        self.rule.restored()
        if self.average is not None and averages is not None:
            self.average.reset(averages)
        publish_(self._weights, self._gradients)
        self.restorations += 1

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Compute with the averages of the weights within the block."""
        assert self.average is not None
        try:
            with self.average.in_masters():
                publish_(self._weights, self._gradients)
                yield
        finally:
            publish_(self._weights, self._gradients)

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the optimizer state: parameter name, state name, local tensor (scalars are equal on every rank)."""
        for entry in self.entries:
            for state, value in self.rule.state(entry).items():
                yield entry.name, state, value

    def averages(self) -> Iterator[tuple[Entry, Tensor]]:
        """Yield the average of each weight; nothing without one."""
        return ((entry, self.average.tensors[entry.name]) for entry in self.entries if self.average is not None)


class AdamW(UpdateRule):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), as torch computes it.

    It reads `betas` and `eps`, and keeps `step` (a scalar), `exp_avg` and `exp_avg_sq`. It calls the kernel of
    `torch.optim.AdamW` directly, as the overhead of torch's optimizer shows in a small model's step.
    """

    decoupled: ClassVar[bool] = True
    """Whether weight decay shrinks the weight instead of being added to the gradient."""

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig) -> None:
        super().__init__(entries, config)
        self._states: dict[str, dict[str, Tensor]] = {}
        self._groups: list[tuple[float, list[Entry], Tensor, dict[str, Sequence[Tensor]]]] = []
        """Weight decay, entries with it, their counts of updates as one tensor, and states; `step` views the counts."""
        for decay in dict.fromkeys(map(self.weight_decay, self.entries)):
            group = [entry for entry in self.entries if self.weight_decay(entry) == decay]
            counts = torch.zeros(len(group), dtype=torch.float32, device=group[0].master.device)
            means, squares = ([torch.zeros_like(entry.master) for entry in group] for _ in range(2))
            states: dict[str, Sequence[Tensor]] = {"step": counts.unbind(), "exp_avg": means, "exp_avg_sq": squares}
            self._groups.append((decay, group, counts, states))
            for place, entry in enumerate(group):
                self._states[entry.name] = {name: values[place] for name, values in states.items()}

    def step(self, lr: float) -> None:
        for decay, entries, counts, states in self._groups:
            counts.add_(1)
            fused_adam_(
                [entry.master for entry in entries],
                [entry.gradients[entry.leaf] for entry in entries],
                states["exp_avg"],
                states["exp_avg_sq"],
                states["step"],
                self.decoupled,
                lr=lr,
                betas=self.config.betas,
                weight_decay=decay,
                eps=self.config.eps,
            )

    def state(self, entry: Entry) -> Mapping[str, Tensor]:
        return self._states[entry.name]


class Adam(AdamW):
    """Adam, with weight decay added to the gradient: reads and keeps the same as `AdamW`."""

    decoupled: ClassVar[bool] = False


def learning_rate(update: int, config: OptimizerConfig) -> float:
    """Return the learning rate of an update: linear warm-up from 0 to `lr`, then the schedule named by `decay`.

    Update 1 is the first; 0 gives the learning rate from which the warm-up starts. Raises a `UserError` if the schedule
    belongs to another package and cannot be imported.
    """
    if update < config.warmup_steps:
        return config.lr * update / config.warmup_steps
    return _schedule(config.decay)(update, config)


AfterWarmup = Callable[[int, OptimizerConfig], float]
"""Learning-rate schedule: learning rate of an update after the warm-up (1 for the first), from the resolved config."""


@cache  # finding another package's schedule searches all installed packages
def _schedule(name: str) -> AfterWarmup:
    found: AfterWarmup = LR_SCHEDULES.load(name)
    return found


def constant(update: int, config: OptimizerConfig) -> float:
    """Keep `lr` constant."""
    return config.lr


def cosine(update: int, config: OptimizerConfig) -> float:
    """Decay from `lr` at the end of the warm-up to `min_lr` at `decay_steps` along half a cosine, then stay there."""
    if update >= config.decay_steps:
        return config.min_lr
    if update <= config.warmup_steps:
        return config.lr
    done = (update - config.warmup_steps) / (config.decay_steps - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * ((1 + cos(pi * done)) / 2)


def linear(update: int, config: OptimizerConfig, hold_until: int | None = None) -> float:
    """Decay linearly from `lr` at the end of the warm-up to `min_lr` at `decay_steps`, then stay at `min_lr`.

    `hold_until` is the last update at `lr`, by default the last one of the warm-up.
    """
    start = config.warmup_steps if hold_until is None else hold_until
    if update >= config.decay_steps:
        return config.min_lr
    if update <= start:
        return config.lr
    done = (update - start) / (config.decay_steps - start)
    return config.min_lr + (config.lr - config.min_lr) * (1 - done)


def wsd(update: int, config: OptimizerConfig) -> float:
    """Hold `lr` for `stable_steps` after the warm-up, then decay linearly to `min_lr` at `decay_steps`."""
    return linear(update, config, hold_until=config.warmup_steps + config.stable_steps)

"""The update of a rank's weights: the global gradient norm, the optimizer, AdamW, and the learning-rate schedules.

An optimizer is one `UpdateRule`: AdamW and Adam below, the others in `train/optimizers.py` or in another package. A
learning-rate schedule is one function, below or in another package. `config.optimizer` has a row for each.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import cos, pi
from typing import ClassVar

import torch
from torch import Tensor

from threefold.comm.axis import Axis
from threefold.comm.mesh import Mesh
from threefold.config import OptimizerConfig
from threefold.config.optimizer import LR_SCHEDULES
from threefold.models.sharding import ModelPlan
from threefold.ops.arithmetic import PLAIN, LayerArithmetic
from threefold.parallel.arithmetic import RankArithmetic
from threefold.parallel.gradients import NORM_ELEMENTS, Gradients, squared_norm
from threefold.parallel.parameter import ShardedMatrix, Weight, is_split, publish_
from threefold.parallel.pipeline.stage import TiedWeights
from threefold.torch_private.tensors import fused_adam_
from threefold.train.update_rule import Entry, UpdateRule


class Optimizer:
    """Optimizer of one rank's parameters.

    Args:
        plan: layers of the model; the weights between the first and the last layer are hidden.
        axes: mesh axes that may shard a parameter.
        arithmetic: how an update multiplies whole matrices.

    Attributes:
        entries: the trained weights.
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
            own = weight.name, parameter, weight.leaf, weight.master
            self.entries.append(Entry(*own, gradients, whole, hidden, arithmetic))
        self._narrow = [weight for weight in trained if weight.master is not weight.leaf]
        self.rule = rule(self.entries, config)
        self.restorations = 0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self.rule.step(lr)
        if self._narrow:
            publish_(self._narrow, self._gradients)
        else:
            self._gradients.weights_changed()

    @torch.no_grad()
    def restored(self) -> None:
        """Take over the masters and the tensors of `states` after a checkpoint has filled them."""
        self.rule.restored()
        publish_(self._weights, self._gradients)
        self.restorations += 1

    def states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the optimizer state: parameter name, state name, local tensor (scalars are equal on every rank)."""
        for entry in self.entries:
            for state, value in self.rule.state(entry).items():
                yield entry.name, state, value


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


class GradientNorm:
    """This rank's terms of the global gradient norm, from the current gradients.

    Each gradient counts once, on one of the ranks that hold it.

    Args:
        tied: tied weights that several stages hold; None without them.
        at_once: number of neighbouring elements, as in `squared_norm`.
        arithmetic: how the squares are added up.
    """

    def __init__(
        self,
        gradients: Gradients,
        weights: Iterable[Weight],
        mesh: Mesh,
        tied: TiedWeights | None = None,
        at_once: int = NORM_ELEMENTS,
        arithmetic: RankArithmetic | None = None,
    ) -> None:
        self._gradients, self._at_once, self._device = gradients, at_once, mesh.device
        self._arithmetic = arithmetic or RankArithmetic()
        self._counted: list[Weight] = []
        self._others: list[Tensor] = []
        for weight in weights:
            counts = (
                gradients.is_in_norm(weight.leaf)
                and (tied is None or tied.is_primary(weight.name))
                and (is_split(weight.parameter) or mesh.tp.is_first)
            )
            if counts:
                self._counted.append(weight)
            else:
                self._others.append(weight.leaf)

    def squares(self, masked: bool = False) -> Tensor:
        """Return this rank's summands of the squared norm, over the gradients that it counts, and one more: fp64 [n].

        The last is `uncounted_overflow`; if `masked`, it is NaN if any gradient of this rank is not finite.
        """
        squares = self._of_counted().reshape(-1)
        overflow = self.uncounted_overflow().view(1)
        if masked:
            overflow = overflow + 0 * squares.sum()
        return torch.cat([squares, overflow])

    def uncounted_overflow(self) -> Tensor:
        """Return 0, or NaN if a gradient that another rank counts is not finite on this rank. fp64 scalar.

        Ranks that share a gradient hold the same bits of it unless the memory or a link of one of them fails. The norm
        would then be finite, and the update of that rank alone would spoil its weights.
        """
        if not self._others:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return 0 * squared_norm(self._gradients.joined(self._others), self._at_once)

    def _of_counted(self) -> Tensor:
        if not self._counted:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return self._arithmetic.squares(self._counted, self._gradients, self._at_once)

"""From the gradients of a step to the update: sum, loss scale, norm, clipping; one code path for runs and loops.

`GradientStep` and `Engine` (`train/step.py`) also run the forward and backward passes. In a loop around
`threefold.prepare`, the caller runs them, and in one with Horovod's optimizer the update too.
"""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from threefold.comm.mesh import Mesh
from threefold.config import PrecisionConfig
from threefold.errors import UserError
from threefold.parallel.arithmetic import RankArithmetic
from threefold.parallel.expert_biases import ExpertBiases
from threefold.parallel.gradients import NORM_ELEMENTS, Gradients, squared_norm
from threefold.parallel.parameter import Weight, has_uneven_shards, is_split
from threefold.parallel.pipeline.stage import TiedWeights
from threefold.parallel.running_statistics import RunningStatistics

_CLIP_EPS = 1e-6  # same as torch.nn.utils.clip_grad_norm_
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


class Ending(NamedTuple):
    """How a step ends, the same on every rank.

    Attributes:
        finite: whether its loss and the norm of its gradients are finite.
        refused: why a finite step makes no update; empty if it makes one.
        goes_on: whether training can go on; False if they are not finite and no smaller loss scale could help.
    """

    finite: bool
    refused: str = ""
    goes_on: bool = True

    @property
    def updates(self) -> bool:
        """Whether the step changes the weights."""
        return self.finite and not self.refused


class GradientUpdate:
    """Gradients of a rank's weights, from the first backward pass of a step to the update.

    A step calls `begin`, runs its backward passes, and calls `finish` and `unscale_`; then `end`, or `decide`, `clip_`
    and the update one by one. All but `unscale_` and `clip_` are collective over the ranks of the mesh.

    Args:
        weights: all weights of this rank.
        partial: leaves that tensor ranks hold whole, whose gradients are sums over these ranks.
        loss_scale: multiplies the loss in the backward pass, and divides the gradients afterwards; None without one.
        buffers: buffers that forward passes change, restored in a step without an update; None to leave them alone.
        tied: tied weights that several stages hold; None without them.
        copies: pairs of leaves of one weight, whose gradients are summed separately and added up here.
        at_once: number of neighbouring elements of which the norm adds up the squares, as in `squared_norm`.
        arithmetic: how it adds them up.
        biases: expert biases that follow the load, moved in a step with an update; None without any.

    Attributes:
        weights: all weights of this rank; `trained` are those with a gradient.
        counted: trained weights whose elements this rank adds up in global sums, such as the gradient norm; each counts
            once, on one of the ranks that hold it.
        clipped: factor by which the last step's gradients were scaled down to the limit of their norm; 1 if not.
    """

    def __init__(
        self,
        mesh: Mesh,
        gradients: Gradients,
        weights: Sequence[Weight],
        partial: Sequence[Tensor] = (),
        loss_scale: LossScale | None = None,
        buffers: RunningStatistics | None = None,
        tied: TiedWeights | None = None,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
        at_once: int = NORM_ELEMENTS,
        arithmetic: RankArithmetic | None = None,
        biases: ExpertBiases | None = None,
    ) -> None:
        self.biases = None if biases is None or biases.is_idle else biases
        self.mesh, self.gradients, self.loss_scale = mesh, gradients, loss_scale
        self.weights, self.trained = weights, [weight for weight in weights if weight.is_trained]
        self._partial, self._tied, self._copies, self._statistics = list(partial), tied, copies, buffers
        self._in_order = any(has_uneven_shards(weight.parameter) for weight in weights)
        self.arithmetic, self._at_once = arithmetic or RankArithmetic(), at_once
        self.counted: list[Weight] = []
        self.clipped = 1.0
        self._is_new = True  # no step has begun
        self._uncounted: list[Tensor] = []
        for weight in self.trained:
            counts = (
                gradients.is_in_norm(weight.leaf)
                and (tied is None or tied.is_primary(weight.name))
                and (is_split(weight.parameter) or mesh.tp.is_first)
            )
            if counts:
                self.counted.append(weight)
            else:
                self._uncounted.append(weight.leaf)

    @property
    def scale(self) -> float:
        """Factor of the loss in the backward passes: the loss scale, or 1."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def begin(self, arrivals: int | None) -> None:
        """Begin a step in which each weight gets `arrivals` gradients, one per backward pass; None if unknown."""
        self.gradients.begin(arrivals)
        self.clipped, self._is_new = 1.0, False
        if self._statistics is not None and not self._statistics.is_idle:
            self._statistics.begin()
        if self.biases is not None:
            self.biases.begin()

    def finish(self, fraction: float = 1.0) -> None:
        """Sum the gradients over the ranks. This rank has a `fraction` of the samples, for means of buffers."""
        # Over the replicas (dp · cp), each of which had its own samples or positions: wait for the all-reduces, or with
        # ZeRO the reduce-scatters.
        self.gradients.finish()
        if self._statistics is not None and not self._statistics.is_idle:
            self._statistics.finish(fraction)
        if self.biases is not None:
            self.biases.sum_counts()
        # Uses of a tied weight on this rank whose gradients were summed apart, as if each were on a stage of its own.
        for leaf, copy in self._copies:
            self.gradients[leaf].add_(self.gradients[copy])
        # Over tp: with sequence parallelism, or for per-head norms, the gradients of replicated weights are partial.
        # All other replicated weights already have equal gradients.
        if self._partial:
            self.mesh.tp.all_reduce_together_([self.gradients[leaf] for leaf in self._partial])
        # Tied weights, over the stages that use them: each has the gradient of its own use.
        if self._tied is not None:
            gradients = {weight.name: self.gradients[weight.leaf] for weight in self.trained}
            self._tied.sum_(gradients, self._in_order)

    def require_gradients(self) -> None:
        """Raise a `UserError` before the first step, when there are no gradients."""
        if self._is_new:
            raise UserError("There are no gradients before the first step; ask for them in after_step.")

    def unscale_(self, scale: float) -> None:
        """Divide the gradients by the factor of the loss, which kept small gradients from vanishing so far."""
        if scale != 1:
            self.gradients.scale_(1 / scale)

    def local_squares(self) -> Tensor:
        """Return this rank's summands of the squared norm of all gradients: fp64 [n].

        The last is 0, or NaN if a gradient that another rank counts is not finite on this rank; with a loss scale, if
        any gradient is not. Ranks that share a gradient hold the same bits of it unless the memory or a link of one of
        them fails. The norm would then be finite, and the update of that rank alone would spoil its weights.
        """
        squares = overflow = torch.zeros(1, dtype=torch.float64, device=self.mesh.device)
        if self.counted:
            squares = self.arithmetic.squares(self.counted, self.gradients, self._at_once).reshape(-1)
        if self._uncounted:
            overflow = 0 * squared_norm(self.gradients.joined(self._uncounted), self._at_once).view(1)
        if self.loss_scale is not None:
            overflow = overflow + 0 * squares.sum()
        return torch.cat([squares, overflow])

    def squared_norm(self) -> Tensor:
        """Return the squared global norm of the gradients, equal on every rank, so that all decide alike. fp64 [1]."""
        return self.mesh.world.all_reduce_(self.local_squares().sum().view(1))

    def decide(self, norm: float, loss: float = 0.0, refuses: Callable[[float, float], str] | None = None) -> Ending:
        """Decide whether a step updates the weights, and adapt the loss scale; restore the buffers, or move the biases.

        Args:
            norm, loss: global norm of the gradients, and loss, equal on every rank.
            refuses: returns why a step with this loss and norm, both finite, must not update; empty to update. Such a
                step leaves the loss scale as it would be.
        """
        finite = isfinite(loss) and isfinite(norm)
        refused = refuses(loss, norm) if finite and refuses is not None else ""
        if (not finite or refused) and self._statistics is not None:
            self._statistics.undo()
        goes_on = finite or (self.loss_scale is not None and not self.loss_scale.is_least)
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        ending = Ending(finite, refused, goes_on)
        if ending.updates and self.biases is not None:
            self.biases.update()
        return ending

    def clip_(self, norm: float, limit: float | None) -> bool:
        """Scale gradients down to the norm `limit` (0 or None for none) if theirs is above; return whether it was."""
        if limit and (coefficient := limit / (norm + _CLIP_EPS)) < 1:
            self.gradients.scale_(coefficient)
            self.clipped = coefficient
            return True
        return False

    def end(
        self,
        norm: float,
        limit: float | None,
        update: Callable[[], None],
        loss: float = 0.0,
        refuses: Callable[[float, float], str] | None = None,
    ) -> Ending:
        """End a step: decide, and clip the gradients to the norm `limit` and update the weights if it has an update."""
        ending = self.decide(norm, loss, refuses)
        if ending.updates:
            self.clip_(norm, limit)
            update()
        return ending

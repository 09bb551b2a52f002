"""From the gradients of a step to the update: one code path for runs, and for loops around `parallelize` and `prepare`.

`GradientStep` and `Engine` (`train/step.py`) also run the forward and backward passes. In a loop around
`threefold.prepare`, the caller runs them, and in one with Horovod's optimizer the update too.
"""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import NamedTuple

from torch import Tensor

from threefold.comm.mesh import Mesh
from threefold.parallel.gradients import Gradients
from threefold.parallel.moving_buffers import MovingBuffers
from threefold.parallel.parameter import Weight, has_uneven_shards
from threefold.parallel.pipeline.stage import TiedWeights
from threefold.train.optim import GradientNorm
from threefold.train.update_rule import LossScale

_CLIP_EPS = 1e-6  # same as torch.nn.utils.clip_grad_norm_


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
        norm: terms of the global norm; None for those of the trained weights.
        buffers: buffers that forward passes change, restored in a step without an update; None to leave them alone.
        tied: tied weights that several stages hold; None without them.
        copies: pairs of leaves of one weight, whose gradients are summed separately and added up here.
    """

    def __init__(
        self,
        mesh: Mesh,
        gradients: Gradients,
        weights: Sequence[Weight],
        partial: Sequence[Tensor] = (),
        loss_scale: LossScale | None = None,
        norm: GradientNorm | None = None,
        buffers: MovingBuffers | None = None,
        tied: TiedWeights | None = None,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self.mesh, self.gradients, self.loss_scale = mesh, gradients, loss_scale
        self._trained = [weight for weight in weights if weight.is_trained]
        self._partial, self._tied, self._copies, self._moving = list(partial), tied, copies, buffers
        self._in_order = any(has_uneven_shards(weight.parameter) for weight in weights)
        self._norm = norm or GradientNorm(gradients, self._trained, mesh, tied)

    @property
    def scale(self) -> float:
        """Factor of the loss in the backward passes: the loss scale, or 1."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def begin(self, arrivals: int | None) -> None:
        """Begin a step in which each weight gets `arrivals` gradients, one per backward pass; None if unknown."""
        self.gradients.begin(arrivals)
        if self._moving is not None and not self._moving.is_idle:
            self._moving.begin()

    def finish(self, share: float = 1.0) -> None:
        """Sum the gradients over the ranks. `share` is this rank's share of the samples, for means of buffers."""
        # Over the replicas (dp · cp), each of which had its own samples or positions: wait for the all-reduces, or with
        # ZeRO the reduce-scatters.
        self.gradients.finish()
        if self._moving is not None and not self._moving.is_idle:
            self._moving.finish(share)
        # Uses of a tied weight on this rank whose gradients were summed apart, as if each were on a stage of its own.
        for leaf, copy in self._copies:
            self.gradients[leaf].add_(self.gradients[copy])
        # Over tp: with sequence parallelism, or for per-head norms, the gradients of replicated weights are partial.
        # All other replicated weights already have equal gradients.
        if self._partial:
            self.mesh.tp.all_reduce_together_([self.gradients[leaf] for leaf in self._partial])
        # Tied weights, over the stages that use them: each has the gradient of its own use.
        if self._tied is not None:
            gradients = {weight.name: self.gradients[weight.leaf] for weight in self._trained}
            self._tied.sum_(gradients, self._in_order)

    def unscale_(self, scale: float) -> None:
        """Divide the gradients by the factor of the loss, which kept small gradients from vanishing so far."""
        if scale != 1:
            self.gradients.scale_(1 / scale)

    def local_squares(self) -> Tensor:
        """Return this rank's summands of the squared norm of all gradients: fp64 [n], with NaN if one is not finite."""
        return self._norm.squares(masked=self.loss_scale is not None)

    def squared_norm(self) -> Tensor:
        """Return the squared global norm of the gradients, equal on every rank, so that all decide alike. fp64 [1]."""
        return self.mesh.world.all_reduce_(self.local_squares().sum().view(1))

    def decide(self, norm: float, loss: float = 0.0, refuses: Callable[[float, float], str] | None = None) -> Ending:
        """Decide whether a step updates the weights, and adapt the loss scale; without an update, restore the buffers.

        Args:
            norm, loss: global norm of the gradients, and loss, equal on every rank.
            refuses: returns why a step with this loss and norm, both finite, must not update; empty to update. Such a
                step leaves the loss scale as it would be.
        """
        finite = isfinite(loss) and isfinite(norm)
        refused = refuses(loss, norm) if finite and refuses is not None else ""
        if (not finite or refused) and self._moving is not None:
            self._moving.undo()
        goes_on = finite or (self.loss_scale is not None and not self.loss_scale.is_least)
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        return Ending(finite, refused, goes_on)

    def clip_(self, norm: float, limit: float | None) -> bool:
        """Scale gradients down to the norm `limit` (0 or None for none) if theirs is above; return whether it was."""
        if limit and (coefficient := limit / (norm + _CLIP_EPS)) < 1:
            self.gradients.scale_(coefficient)
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

"""Tied weights (tied embeddings) across pipeline stages: the copies' gradients are summed, so they stay equal."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from torch import Tensor

from threefold.comm.axis import Axis
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.models.sharding import ModelPlan
from threefold.parallel.pipeline.placement import StageMap
from threefold.parallel.pipeline.stage_map import covers, shared_between


class TiedWeights:
    """The tied weights (such as tied embeddings) of this rank's stages that another rank uses too.

    Uses on one rank share a copy, whose gradient autograd accumulates; those of several ranks are all-reduced here.

    Collective over the world: every rank makes it, also those whose stages share nothing.

    Args:
        plan: names the tied weights.
        stages: the pipeline's stages.
        mesh: of this rank.
    """

    def __init__(self, plan: ModelPlan, stages: StageMap, mesh: Mesh) -> None:
        self._axes: dict[str, Axis] = {}
        made: dict[tuple[int, ...], Axis | None] = {}
        for owner, ranks in shared_between(plan, stages).items():
            if ranks not in made:
                made[ranks] = _axis(ranks, mesh)
            axis = made[ranks]
            if axis is not None:
                self._axes[owner] = axis

    def __contains__(self, name: str) -> bool:
        return self._axis_of(name) is not None

    def is_primary(self, name: str) -> bool:
        """Whether this rank holds the copy of the parameter `name` that the global norm includes."""
        axis = self._axis_of(name)
        return axis is None or axis.is_first

    def sum_(self, gradients: Mapping[str, Tensor], in_order: bool = False) -> None:
        """Replace each shared weight's gradient by the sum over its uses, bit-equal on every rank that holds it.

        Args:
            gradients: by the one name that a parameter has.
            in_order: as of `Axis.all_reduce_together_`.
        """
        for owner, axis in self._axes.items():
            # In one order on every rank, whatever stages it holds.
            mine = [gradients[name] for name in sorted(gradients) if covers(owner, name)]
            axis.all_reduce_together_(mine, in_order)

    def _axis_of(self, name: str) -> Axis | None:
        return next((axis for owner, axis in self._axes.items() if covers(owner, name)), None)


def _axis(ranks: tuple[int, ...], mesh: Mesh) -> Axis | None:
    """The indices `ranks` of this rank's pp axis, as an axis in that order; None where the rank is at none of them."""
    if ranks == tuple(range(mesh.pp.size)):
        return replace(mesh.pp, name="tie", device_mesh=None)
    return mesh.new_axis("tie", _groups(ranks, mesh.layout))


def _groups(ranks: Sequence[int], layout: Layout) -> list[list[int]]:
    places = product(range(layout.dp), range(layout.cp), range(layout.tp))
    return [[layout.rank_of(dp=dp, pp=pp, cp=cp, tp=tp) for pp in ranks] for dp, cp, tp in places]

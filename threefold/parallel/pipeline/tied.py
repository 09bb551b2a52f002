"""Weights that several stages share: each holds a copy, and their gradients are summed, so the copies stay equal."""

from collections.abc import Mapping, Sequence
from itertools import product

from torch import Tensor

from threefold.parallel.layout import Layout
from threefold.parallel.mesh import Axis, Mesh
from threefold.parallel.split import ModelPlan


class TiedWeights:
    """The tied weights of this rank's stage that another stage uses too.

    Collective over the world: every rank makes it, also those whose stage shares nothing.

    Args:
        plan: names the ties.
        bounds: first layer of each stage, and the number of layers.
        mesh: this rank's place.
    """

    def __init__(self, plan: ModelPlan, bounds: Sequence[int], mesh: Mesh) -> None:
        self._axes: dict[str, Axis] = {}
        for owner, stages in shared_between(plan, bounds).items():
            axis = mesh.new_axis("tie", _groups(stages, mesh.layout))
            if axis is not None:
                self._axes[owner] = axis

    def __contains__(self, name: str) -> bool:
        return name in self._axes

    def owns(self, name: str) -> bool:
        """Whether this stage is the one that counts and stores the parameter `name` (of those that it holds)."""
        return name not in self._axes or self._axes[name].is_first

    def sum_(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace each shared weight's gradient by the sum over its uses, bit-equal on every stage that holds it."""
        for name, axis in self._axes.items():
            axis.all_reduce_(gradients[name])


def shared_between(plan: ModelPlan, bounds: Sequence[int]) -> dict[str, list[int]]:
    """Name of each tied weight that more than one stage uses → those stages, its owner's first."""
    stages: dict[str, list[int]] = {}
    for borrower, owner in plan.ties.items():
        used = stages.setdefault(owner, [_stage_of(owner, plan, bounds)])
        stage = _stage_of(borrower, plan, bounds)
        if stage not in used:
            used.append(stage)
    return {owner: used for owner, used in stages.items() if len(used) > 1}


def _stage_of(parameter: str, plan: ModelPlan, bounds: Sequence[int]) -> int:
    layer = next(place for place, name in enumerate(plan.layers) if parameter.startswith(name + "."))
    return next(stage for stage in range(len(bounds) - 1) if bounds[stage] <= layer < bounds[stage + 1])


def _groups(stages: Sequence[int], layout: Layout) -> list[list[int]]:
    places = product(range(layout.dp), range(layout.tp))
    return [[layout.rank_of(dp=dp, pp=stage, tp=tp) for stage in stages] for dp, tp in places]

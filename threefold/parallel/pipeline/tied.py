"""Weights that several stages share: each holds a copy, and their gradients are summed, so the copies stay equal."""

from collections.abc import Mapping, Sequence
from itertools import product

from torch import Tensor

from threefold.parallel.layout import Layout
from threefold.parallel.mesh import Axis, Mesh
from threefold.parallel.pipeline.placement import StageMap
from threefold.parallel.split import ModelPlan


class TiedWeights:
    """The tied weights of this rank's stage that another stage uses too.

    Collective over the world: every rank makes it, also those whose stage shares nothing.

    Args:
        plan: names the ties.
        stages: the pipeline's stages.
        mesh: this rank's place.
    """

    def __init__(self, plan: ModelPlan, stages: StageMap, mesh: Mesh) -> None:
        self._axes: dict[str, Axis] = {}
        for owner, ranks in shared_between(plan, stages).items():
            axis = mesh.new_axis("tie", _groups(ranks, mesh.layout))
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


def shared_between(plan: ModelPlan, stages: StageMap) -> dict[str, list[int]]:
    """Name of each tied weight that more than one pp rank uses → those ranks, its owner's first."""
    ranks: dict[str, list[int]] = {}
    for borrower, owner in plan.ties.items():
        used = ranks.setdefault(owner, [_rank_of(owner, plan, stages)])
        rank = _rank_of(borrower, plan, stages)
        if rank not in used:
            used.append(rank)
    return {owner: used for owner, used in ranks.items() if len(used) > 1}


def _rank_of(parameter: str, plan: ModelPlan, stages: StageMap) -> int:
    layer = next(place for place, name in enumerate(plan.layers) if parameter.startswith(name + "."))
    return stages.ranks[stages.stage_of(layer)]


def _groups(ranks: Sequence[int], layout: Layout) -> list[list[int]]:
    places = product(range(layout.dp), range(layout.cp), range(layout.tp))
    return [[layout.rank_of(dp=dp, pp=pp, cp=cp, tp=tp) for pp in ranks] for dp, cp, tp in places]

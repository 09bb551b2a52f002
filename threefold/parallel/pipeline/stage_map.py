"""The stages of a model's layers as a config partitions them, and which of them share weights. Needs no torch."""

from collections.abc import Sequence
from itertools import combinations

from threefold.config.schedules import Schedule
from threefold.config.schema import Config
from threefold.errors import UserError
from threefold.models.sharding import ModelPlan
from threefold.parallel.pipeline.partition import stage_bounds
from threefold.parallel.pipeline.placement import StageMap


def stage_map(plan: ModelPlan, config: Config) -> StageMap:
    """The stages of a model's layers, as a config partitions them.

    Raises:
        UserError: the layers cannot be divided among the stages like that, or not with ZeRO.
    """
    parallel = config.parallel
    if parallel.pp == 1:
        return StageMap((0, len(plan.layers)), (0,))
    return partitioned(
        plan, parallel.pp, parallel.pipeline_schedule, parallel.stage_chunks, parallel.partition, parallel.zero
    )


def partitioned(
    plan: ModelPlan, pp: int, schedule: Schedule, chunks: int, partition: str | Sequence[int], zero: int
) -> StageMap:
    ranks = schedule.stage_ranks(pp, chunks)
    stages = StageMap(tuple(stage_bounds(plan.costs, plan.kinds, len(ranks), partition, pp)), ranks)
    if zero and (found := between_stages_of_a_rank(plan, stages)):
        one, other, place = found
        raise UserError(
            f"parallel.zero is {zero} but {one} and {other} share weights and are on two stages of pp rank "
            f"{place}; use 0 or a parallel.schedule of one stage a rank, such as 1f1b."
        )
    return stages


def shared_between(plan: ModelPlan, stages: StageMap) -> dict[str, tuple[int, ...]]:
    """Owner of each group of tied weights that more than one pp rank uses → those ranks, the owner's first."""
    used: dict[str, tuple[int, ...]] = {}
    for owner, *users in plan.tied_groups():
        places = [_rank_of(name, plan, stages) for name in (owner, *users)]
        ranks = tuple(dict.fromkeys(places))
        if len(ranks) > 1:
            used[owner] = ranks
    return used


def between_stages_of_a_rank(plan: ModelPlan, stages: StageMap) -> tuple[str, str, int] | None:
    """Two names that share a weight from different stages of one pp rank, and that rank; None where none do."""
    for group in plan.tied_groups():
        places = [(name, _stage_of(name, plan, stages)) for name in group]
        for (name, stage), (other, later) in combinations(places, 2):
            if stage != later and stages.ranks[stage] == stages.ranks[later]:
                return name, other, stages.ranks[stage]
    return None


def covers(owner: str, name: str) -> bool:
    """Whether the parameter `name` is the one called `owner`, or is in the module of that name."""
    return name == owner or name.startswith(owner + ".")


def _rank_of(name: str, plan: ModelPlan, stages: StageMap) -> int:
    return stages.ranks[_stage_of(name, plan, stages)]


def _stage_of(name: str, plan: ModelPlan, stages: StageMap) -> int:
    return stages.stage_of(next(place for place, layer in enumerate(plan.layers) if covers(layer, name)))

"""From a config to the division of a model among ranks."""

from threefold.config import Config
from threefold.errors import UserError
from threefold.models.sharding import ModelPlan
from threefold.parallel.pipeline.partition import stage_bounds
from threefold.parallel.pipeline.placement import StageMap, stage_ranks
from threefold.parallel.pipeline.tied import between_stages_of_a_rank


def stage_map(plan: ModelPlan, config: Config) -> StageMap:
    """Where a config puts the layers of a model.

    Raises:
        UserError: the layers cannot be shared among the stages like that, or not with the replicas sharing weights.
    """
    parallel = config.parallel
    if parallel.pp == 1:
        return StageMap((0, len(plan.layers)), (0,))
    ranks = stage_ranks(parallel.schedule, parallel.pp, parallel.stage_chunks)
    stages = StageMap(tuple(stage_bounds(plan.costs, plan.kinds, len(ranks), parallel.partition)), ranks)
    if parallel.zero and (found := between_stages_of_a_rank(plan, stages)):
        one, other, place = found
        raise UserError(
            f"parallel.zero is {parallel.zero} but {one} and {other} share weights and lie on two stages of pp rank "
            f"{place}; use 0 or a parallel.schedule of one stage a rank, such as 1f1b."
        )
    return stages

"""From a config to the division of a model among ranks."""

from threefold.config import Config
from threefold.parallel.pipeline.placement import StageMap, stage_ranks
from threefold.parallel.split import ModelPlan


def stage_map(plan: ModelPlan, config: Config) -> StageMap:
    """Where a config puts the layers of a model.

    Raises:
        UserError: the layers cannot be shared among the stages like that.
    """
    parallel = config.parallel
    if parallel.pp == 1:
        return StageMap((0, len(plan.layers)), (0,))
    ranks = stage_ranks(parallel.schedule, parallel.pp, parallel.stage_chunks)
    return StageMap(tuple(plan.stage_bounds(len(ranks), parallel.partition)), ranks)

"""The learning rate of each update: a linear warm-up, then the configured schedule."""

from collections.abc import Callable
from functools import cache

from threefold.config import OptimizerConfig
from threefold.config.optimizer import LR_SCHEDULES

AfterWarmup = Callable[[int, OptimizerConfig], float]
"""A learning-rate schedule: the rate of an update (1 for the first) that is not in the warm-up, from the resolved
config."""


def learning_rate(update: int, config: OptimizerConfig) -> float:
    """The rate of an update: linear warm-up from 0 to `lr`, then what `decay` names.

    Args:
        update: 1 for the first update; at 0 the rate is where the warm-up starts from.
        config: resolved, so no field is None.

    Raises:
        UserError: the schedule is another package's and cannot be imported.
    """
    if update < config.warmup_steps:
        return config.lr * update / config.warmup_steps
    return _schedule(config.decay)(update, config)


@cache  # another package's takes a search of all that are installed
def _schedule(name: str) -> AfterWarmup:
    found: AfterWarmup = LR_SCHEDULES.load(name)
    return found

"""The learning rate of each update: a linear warm-up, then the configured schedule."""

from collections.abc import Callable
from functools import cache

from threefold.config import OptimizerConfig
from threefold.config.optimizer import LR_SCHEDULES

AfterWarmup = Callable[[int, OptimizerConfig], float]
"""A learning-rate schedule: the learning rate of an update (1 for the first) after the warm-up, from the resolved
config."""


def learning_rate(update: int, config: OptimizerConfig) -> float:
    """The learning rate of an update: linear warm-up from 0 to `lr`, then the schedule that `decay` names.

    Args:
        update: 1 for the first update; at 0 the learning rate from which the warm-up starts.
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

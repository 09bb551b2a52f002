"""Learning-rate schedules: learning rate after the warm-up. Each one has a row in `config.optimizer.LR_SCHEDULES`."""

from collections.abc import Callable
from functools import cache
from math import cos, pi

from threefold.config import OptimizerConfig
from threefold.config.optimizer import LR_SCHEDULES


def constant(update: int, config: OptimizerConfig) -> float:
    """Keep `lr` constant."""
    return config.lr


def cosine(update: int, config: OptimizerConfig) -> float:
    """Decay from `lr` at the end of the warm-up to `min_lr` at `decay_steps` along half a cosine, then stay there."""
    if update >= config.decay_steps:
        return config.min_lr
    if update <= config.warmup_steps:
        return config.lr
    done = (update - config.warmup_steps) / (config.decay_steps - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * ((1 + cos(pi * done)) / 2)


def linear(update: int, config: OptimizerConfig, hold_until: int | None = None) -> float:
    """Decay linearly from `lr` at the end of the warm-up to `min_lr` at `decay_steps`, then stay at `min_lr`.

    `hold_until` is the last update at `lr`, by default the last one of the warm-up.
    """
    start = config.warmup_steps if hold_until is None else hold_until
    if update >= config.decay_steps:
        return config.min_lr
    if update <= start:
        return config.lr
    done = (update - start) / (config.decay_steps - start)
    return config.min_lr + (config.lr - config.min_lr) * (1 - done)


def wsd(update: int, config: OptimizerConfig) -> float:
    """Hold `lr` for `stable_steps` after the warm-up, then decay linearly to `min_lr` at `decay_steps`."""
    return linear(update, config, hold_until=config.warmup_steps + config.stable_steps)


AfterWarmup = Callable[[int, OptimizerConfig], float]
"""Learning-rate schedule: learning rate of an update after the warm-up (1 for the first), from the resolved config."""


def learning_rate(update: int, config: OptimizerConfig) -> float:
    """Return the learning rate of an update: linear warm-up from 0 to `lr`, then the schedule named by `decay`.

    Args:
        update: 1 for the first update; 0 gives the learning rate from which the warm-up starts.
        config: resolved config, so no field is None.

    Raises:
        UserError: the schedule belongs to another package and cannot be imported.
    """
    if update < config.warmup_steps:
        return config.lr * update / config.warmup_steps
    return _schedule(config.decay)(update, config)


@cache  # finding another package's schedule searches all installed packages
def _schedule(name: str) -> AfterWarmup:
    found: AfterWarmup = LR_SCHEDULES.load(name)
    return found

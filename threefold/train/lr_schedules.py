"""Learning-rate schedules, one file each: what follows the warm-up. `config.optimizer.LR_SCHEDULES` has a row for
every one of them."""

from collections.abc import Callable
from functools import cache
from math import cos, pi

from threefold.config import OptimizerConfig
from threefold.config.optimizer import LR_SCHEDULES


def constant(update: int, config: OptimizerConfig) -> float:
    """`lr` for good."""
    return config.lr


def cosine(update: int, config: OptimizerConfig) -> float:
    """Half a cosine from `lr` at the end of the warm-up to `min_lr` at `decay_steps`, and `min_lr` from there on."""
    if update >= config.decay_steps:
        return config.min_lr
    if update <= config.warmup_steps:
        return config.lr
    done = (update - config.warmup_steps) / (config.decay_steps - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * ((1 + cos(pi * done)) / 2)


def linear(update: int, config: OptimizerConfig, hold_until: int | None = None) -> float:
    """From `lr` at the end of the warm-up to `min_lr` at `decay_steps`, and `min_lr` from there on.

    Args:
        update: 1 for the first; past the warm-up.
        config: resolved.
        hold_until: the last update at `lr`, if not the last of the warm-up.
    """
    start = config.warmup_steps if hold_until is None else hold_until
    if update >= config.decay_steps:
        return config.min_lr
    if update <= start:
        return config.lr
    done = (update - start) / (config.decay_steps - start)
    return config.min_lr + (config.lr - config.min_lr) * (1 - done)


def wsd(update: int, config: OptimizerConfig) -> float:
    """`lr` for `stable_steps` after the warm-up, then linear decay to `min_lr` at `decay_steps`."""
    return linear(update, config, hold_until=config.warmup_steps + config.stable_steps)


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

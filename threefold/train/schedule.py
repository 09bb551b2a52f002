"""The learning rate of each update."""

from math import cos, pi

from threefold.config import OptimizerConfig


def learning_rate(update: int, config: OptimizerConfig) -> float:
    """The rate of an update: linear warm-up from 0 to `lr`, then the decay to `min_lr`, then `min_lr`.

    Args:
        update: 1 for the first update; at 0 the rate is where the warm-up starts from.
        config: resolved, so no field is None.
    """
    if update < config.warmup_steps:
        return config.lr * update / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    start = config.warmup_steps + (config.stable_steps if config.decay == "wsd" else 0)
    if update >= config.decay_steps:
        return config.min_lr
    if update <= start:
        return config.lr
    done = (update - start) / (config.decay_steps - start)
    left = (1 + cos(pi * done)) / 2 if config.decay == "cosine" else 1 - done
    return config.min_lr + (config.lr - config.min_lr) * left

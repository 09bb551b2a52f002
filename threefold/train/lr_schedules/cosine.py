"""Cosine decay of the learning rate (Loshchilov and Hutter, arXiv 1608.03983, without restarts)."""

from math import cos, pi

from threefold.config import OptimizerConfig


def cosine(update: int, config: OptimizerConfig) -> float:
    """Half a cosine from `lr` at the end of the warm-up to `min_lr` at `decay_steps`, and `min_lr` from there on."""
    if update >= config.decay_steps:
        return config.min_lr
    if update <= config.warmup_steps:
        return config.lr
    done = (update - config.warmup_steps) / (config.decay_steps - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * ((1 + cos(pi * done)) / 2)

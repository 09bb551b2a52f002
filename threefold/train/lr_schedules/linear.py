"""Linear decay of the learning rate."""

from threefold.config import OptimizerConfig


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

"""Warm-up, stable, decay (Hu et al., MiniCPM, arXiv 2404.06395): a learning rate that is held before it decays."""

from threefold.config import OptimizerConfig
from threefold.train.lr_schedules.linear import linear


def wsd(update: int, config: OptimizerConfig) -> float:
    """`lr` for `stable_steps` after the warm-up, then linear decay to `min_lr` at `decay_steps`."""
    return linear(update, config, hold_until=config.warmup_steps + config.stable_steps)

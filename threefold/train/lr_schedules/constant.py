"""A constant learning rate."""

from threefold.config import OptimizerConfig


def constant(update: int, config: OptimizerConfig) -> float:
    """`lr` for good."""
    return config.lr

"""Settings of a run: typed sections, loading, resolving, and the rules between settings."""

from threefold.config.loading import load_config
from threefold.config.resolve import resolve
from threefold.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "TrainConfig",
    "load_config",
    "resolve",
]

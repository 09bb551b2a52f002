"""Settings of a run: typed sections, loading, resolving, and the rules between settings."""

from threefold.config.loading import load_config as load_config
from threefold.config.resolve import resolve as resolve
from threefold.config.schema import CheckpointConfig as CheckpointConfig
from threefold.config.schema import Config as Config
from threefold.config.schema import DataConfig as DataConfig
from threefold.config.schema import LogConfig as LogConfig
from threefold.config.schema import ModelConfig as ModelConfig
from threefold.config.schema import OptimizerConfig as OptimizerConfig
from threefold.config.schema import ParallelConfig as ParallelConfig
from threefold.config.schema import PrecisionConfig as PrecisionConfig
from threefold.config.schema import TrainConfig as TrainConfig

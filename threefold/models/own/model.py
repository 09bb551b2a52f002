"""The model and the sharding plan of the file in `model.file`."""

from torch import nn

from threefold.config.model import ModelConfig
from threefold.models.sharding import ModelPlan
from threefold.models.source import file_source


def make_own_model(config: ModelConfig) -> nn.Module:
    make, _ = file_source(config).load_section(config)
    return make()


def own_plan(config: ModelConfig, sequence_length: int) -> ModelPlan:
    _, plan = file_source(config).load_section(config)
    return plan

"""The model of a config.

`FAMILIES` in threefold/config/model.py has a line for each family of the package; other packages add theirs with an
entry point of the group `threefold.model_families` that names a `Family`.
"""

from typing import TYPE_CHECKING

from threefold.config.model import FAMILIES, ModelConfig
from threefold.models.family import Family

if TYPE_CHECKING:
    from threefold.models.hf.model_type import HuggingFaceType
    from threefold.models.layers.decoder import Decoder
    from threefold.models.sharding import ModelPlan


def family_of(config: ModelConfig) -> Family:
    """The family of a model."""
    found: Family = FAMILIES.load(config.architecture)
    return found


def make_model(config: ModelConfig) -> "Decoder":
    """The whole, single-device model.

    Args:
        config: its sizes, resolved (no field is None).
    """
    return family_of(config).make_model(config)


def model_plan(config: ModelConfig, sequence_length: int) -> "ModelPlan":
    """How it is sharded.

    Args:
        config: the model's sizes, resolved.
        sequence_length: tokens per sample, for what attention costs.
    """
    return family_of(config).make_plan(config, sequence_length)


def huggingface_types() -> "dict[str, HuggingFaceType]":
    """What can be imported and exported, of all families, by Hugging Face's `model_type`."""
    families: list[Family] = [FAMILIES.load(name) for name in FAMILIES.names()]
    return {kind.name: kind for family in families for kind in family.huggingface_types()}

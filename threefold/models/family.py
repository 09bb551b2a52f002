"""What a family of models is made of, so that one name in the registry is enough to find all of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from threefold.config.model import FAMILIES, OWN, ModelConfig

if TYPE_CHECKING:
    from threefold.models.hf.model_type import HuggingFaceType
    from threefold.models.layers.decoder import Decoder
    from threefold.models.sharding import ModelPlan


Shapes = Mapping[str, tuple[int, ...]]
"""Names of parameters, and their shapes."""


@dataclass(frozen=True)
class Family:
    """The parts of a family; those that need torch as `module:attribute`, imported when they are first used.

    Attributes:
        title: its name, for people.
        config: the class of its `model` section.
        model: what makes the single-device model from such a config, resolved.
        plan: the function of such a config and the tokens of a sample that returns its `ModelPlan`.
        huggingface: its `HuggingFaceType`s in a tuple, the first that fits a model being the one it is exported as;
            None for a family that is not imported or exported.
        shapes: the function of such a config and the name of a layer that returns the `Shapes` of its parameters,
            without torch; None where the model itself, on the meta device, has to say.
    """

    title: str
    config: type[ModelConfig]
    model: str
    plan: str
    huggingface: str | None = None
    shapes: str | None = None

    def import_parts(self) -> None:
        """Import the model and the plan, of a process that is then forked."""
        for part in (self.model, self.plan):
            resolve_name(part)

    def make_model(self, config: ModelConfig) -> "Decoder":
        """The whole, single-device model of a resolved config."""
        made: Decoder = resolve_name(self.model)(config)
        return made

    def make_plan(self, config: ModelConfig, sequence_length: int) -> "ModelPlan":
        """How it is sharded."""
        made: ModelPlan = resolve_name(self.plan)(config, sequence_length)
        return made

    def layer_shapes(self, config: ModelConfig, layer: str) -> Shapes | None:
        """The shapes of the parameters of a layer, without torch; None where the family does not say them."""
        if self.shapes is None:
            return None
        found: Shapes = resolve_name(self.shapes)(config, layer)
        return found

    def huggingface_types(self) -> "tuple[HuggingFaceType, ...]":
        """The kinds of Hugging Face models that it can be imported from and exported to."""
        types: tuple[HuggingFaceType, ...] = resolve_name(self.huggingface) if self.huggingface else ()
        return types


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


_PER_MULTIPLY_ADD = 6
"""Two operations, in the forward pass and in the backward pass for the gradients of the input and of the weight."""


def model_flops_per_token(config: ModelConfig, sequence_length: int) -> float | None:
    """FLOPs of a token's share of a training step; None for a model of one's own, whose layers tell no costs.

    Needs no torch.

    Args:
        config: of the model, resolved.
        sequence_length: tokens per sample.
    """
    if config.architecture == OWN:
        return None
    plan = model_plan(config, sequence_length)
    # The plan counts attention without the masked half of it; the look-up of the first layer is no product.
    counted = sum(plan.costs[1:])
    windows = (config.window(layer) or sequence_length for layer in range(config.num_layers))
    masked = config.num_attention_heads * config.head_dim * sum(min(window, sequence_length) for window in windows)
    return _PER_MULTIPLY_ADD * (counted + masked)

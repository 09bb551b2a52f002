"""One description of a model's layers, derived from the shapes of their weights and the family's sharding plan.

The FLOPs of a step and the planner use it, so that no family needs formulas of its own.
"""

from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from threefold.config.model import FAMILIES, OWN, ModelConfig
from threefold.models import sharding
from threefold.models.family import family_of, make_model, model_plan

if TYPE_CHECKING:
    from torch import nn


class WeightShape(NamedTuple):
    """Name, rule and whole shape of a parameter; a tied weight has the name of its first use."""

    name: str
    split: sharding.Split
    shape: tuple[int, ...]

    @property
    def last_name(self) -> str:
        """Name of the parameter in its module."""
        return self.name.rpartition(".")[2]

    @property
    def is_of_experts(self) -> bool:
        """Whether the expert axis shards the parameter."""
        return isinstance(self.split, sharding.OverExperts)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one token, or one token of one expert; a single row, such as a gate, counts as none."""
        if len(self.shape) < 2 or min(self.shape) == 1:
            return 0
        return prod(self.shape[1:] if self.is_of_experts else self.shape)

    @property
    def parts(self) -> dict[str, int]:
        """Indices of each part of a unit of the sharded dim, such as queries, keys and values."""
        unit = self.split.units(self.last_name).get("tp")
        return {} if unit is None else dict(unit.parts)


class ModelDescription:
    """Weights of each layer of a model, in order, from its resolved config and the tokens of a sample."""

    def __init__(self, config: ModelConfig, sequence_length: int) -> None:
        self.plan = model_plan(config, sequence_length)
        self.config, self._length = config, sequence_length
        self.weights = {layer: self._weights_of(layer) for layer in self.plan.layers}

    @cached_property
    def flops_per_token(self) -> float:
        """FLOPs of a training step per token; attention counts all pairs of positions within its window."""
        counted = 0
        for number, layer in enumerate(self.plan.layers[1:]):  # the look-up in the first layer is not a product
            for weight in self.weights[layer]:
                counted += weight.multiply_adds * (self.config.experts_per_token if weight.is_of_experts else 1)
            seen = min(self.config.window(number) or self._length, self._length)
            heads = sum(rule.heads for rule in self.rules(layer) if isinstance(rule, sharding.AttentionCore))
            keys = (weight.parts["key"] for weight in self.weights[layer] if "key" in weight.parts)
            counted += 2 * heads * next(keys, self.config.head_dim) * seen
        # Two operations each in the forward pass, the gradient of the input, and the gradient of the weight.
        return float(6 * counted)

    @cached_property
    def model(self) -> "nn.Module":
        """The unsharded model on the meta device."""
        import torch

        with torch.device("meta"):
            return make_model(self.config)

    def _weights_of(self, layer: str) -> tuple[WeightShape, ...]:
        shapes = family_of(self.config).layer_shapes(self.config, layer)
        if shapes is None:
            named = self.model.get_submodule(layer).named_parameters()
            shapes = {name: tuple(weight.shape) for name, weight in named}
        found: list[WeightShape] = []
        for name, shape in shapes.items():
            whole = self.plan.whole_name(f"{layer}.{name}")
            split = self.plan.split_of(whole)
            if split is None:
                raise ValueError(f"the split table says nothing about the parameter {whole!r}")
            found.append(WeightShape(whole, split, shape))
        return tuple(found)

    def rules(self, layer: str) -> list[sharding.Split]:
        """Return the rules of a layer and of the modules inside it."""
        depth = layer.count(".") + 1
        heads = {pattern: ".".join(pattern.split(".")[:depth]) for pattern in self.plan.split}
        return [
            self.plan.split[pattern]
            for pattern, head in heads.items()
            if head[:2] == "**" or sharding.matches(layer, head)
        ]


def describe_model(config: ModelConfig, sequence_length: int) -> ModelDescription:
    """Return the description of a model of a resolved config, cached unless it is a custom one."""
    if config.architecture == OWN:  # the file may change
        return ModelDescription(config, sequence_length)
    return _remembered(config.architecture, config.model_dump_json(exclude_none=True), sequence_length)


@lru_cache(maxsize=16)
def _remembered(family: str, settings: str, sequence_length: int) -> ModelDescription:
    return ModelDescription(FAMILIES.load(family).config.model_validate_json(settings), sequence_length)


def model_flops_per_token(config: ModelConfig, sequence_length: int) -> float | None:
    """Return the FLOPs of a training step per token; None for a custom model, whose operations are not known."""
    if config.architecture == OWN:
        return None
    return describe_model(config, sequence_length).flops_per_token

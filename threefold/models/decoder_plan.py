"""The plan of a `Decoder` as every family has it: its layers, their costs, its tied embeddings and initial weights."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from threefold.config import ModelConfig
from threefold.models.initial_values import Constant, Initial, Normal
from threefold.models.sharding import ModelPlan, Split

_RESIDUAL = ("*.attn.proj.weight", "*.mlp.down.weight", "*.mlp.shared.down.weight", "*.mlp.experts.down")
"""Weights whose output joins the residual stream."""


def decoder_plan(config: ModelConfig, split: Mapping[str, Split], block_costs: Sequence[int]) -> ModelPlan:
    """The plan of a `Decoder`.

    Args:
        config: its sizes.
        split: how its weights are cut.
        block_costs: multiply-adds per token of each block.
    """
    layers, table = config.num_layers, config.vocab_size * config.hidden_size
    # A look-up has no multiply-adds, but its gradient and its memory traffic are not free.
    costs = (table / 16, *block_costs, table)
    return ModelPlan(
        split=split,
        layers=("embed", *(f"blocks.{number}" for number in range(layers)), "head"),
        costs=tuple(float(cost) for cost in costs),
        initial=lambda name: initial_values(name, config),
        kinds=("Input", *["Block"] * layers, "Head"),
        ties={"head.output.weight": "embed.tokens.weight"} if config.tie_embeddings else {},
        recompute={"selective": ("blocks.*.attn.core",), "full": ("blocks.*",)},
    )


def initial_values(name: str, config: ModelConfig) -> Initial:
    """GPT-2's initial weights: N(0, range²), narrower by 1/√(2·layers) where a layer's output joins the residual
    stream; biases 0, and the weights of norms 1."""
    if name.endswith(".bias"):
        return Constant(0.0)
    if fnmatchcase(name, "*norm.weight"):
        return Constant(1.0)
    joins_residual = any(fnmatchcase(name, pattern) for pattern in _RESIDUAL)
    return Normal(config.initializer_range * ((2 * config.num_layers) ** -0.5 if joins_residual else 1.0))

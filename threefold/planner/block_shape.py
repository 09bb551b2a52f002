"""Transformer blocks of a model as the planner's formulas need them, from the shapes and rules of their weights.

A block of attention and a feed-forward network or mixture of experts is planned from its weights, so that no family
needs formulas of its own; any other block is refused with a one-sentence error.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

from threefold.errors import UserError
from threefold.models import sharding
from threefold.models.family import family_of
from threefold.planner.block import ModelDescription, WeightShape


@dataclass(frozen=True)
class Mixture:
    """Mixture of experts, with the inner features of one expert and of the shared expert (0 for none)."""

    count: int
    per_token: int
    inner: int
    shared: int = 0


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Transformer block of the whole model."""

    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    ffn: int  # unused with `experts`
    gated: bool = False
    rms: bool = False
    biased: bool = False
    norms: int = 2  # of the residual stream; with 1, a half block has none
    rotary: bool = False
    qk_norm: bool = False
    activation: str = "gelu_tanh"
    hidden_dropout: bool = False
    attention_dropout: bool = False
    window: int = 0  # in positions; 0 for none
    experts: Mixture | None = None


class UnknownBlock(UserError):
    """Block for which the planner has no formulas."""


@lru_cache(maxsize=16)
def block_shapes(described: ModelDescription) -> tuple[BlockShape, ...]:
    """Return the layers between the first and the last; raise `UnknownBlock` for one without formulas."""
    return tuple(_described(described, layer, number) for number, layer in enumerate(described.plan.layers[1:-1]))


def _described(described: ModelDescription, layer: str, number: int) -> BlockShape:
    config, rules = described.config, described.rules(layer)
    roles: dict[str, list[WeightShape]] = defaultdict(list)
    for weight in described.weights[layer]:
        roles[_role(weight)].append(weight)
    cores = [rule for rule in rules if isinstance(rule, sharding.AttentionCore)]
    _require_known(config.architecture, layer, roles, len(cores))
    projection, down = roles["output of attention"][0], roles["down"]
    heads = {part: size for weight in roles["projection"] for part, size in weight.parts.items()}
    [keys] = {weight.split.units("weight")["tp"].count for weight in roles["projection"] if "key" in weight.parts}
    inner, mixture = down[0].shape[1] if down else 0, None
    if roles["experts"]:
        first, second = roles["experts"]
        mixture = Mixture(first.shape[0], config.experts_per_token, second.shape[2], inner)
    modules = {weight.name.rpartition(".")[0] for weight in roles["bias"]}
    norms = [weight.name.rpartition(".")[0] for weight in roles["norm"]]
    products = [*roles["projection"], projection, *roles["up"], *down, *roles["experts"]]
    return BlockShape(
        hidden=projection.shape[0],
        heads=cores[0].heads,
        key_heads=keys,
        head_dim=heads["key"],
        ffn=config.ffn_hidden_size if mixture else inner,
        gated="gate" in (roles["experts"] or roles["up"])[0].parts,
        rms=not any(name in modules or _is_layer_norm(described, name) for name in norms),
        biased=all(weight.name.rpartition(".")[0] in modules for weight in products),
        norms=len(norms),
        rotary=any(isinstance(rule, sharding.OverContext) for rule in rules),
        qk_norm=bool(roles["norm of heads"]),
        activation=config.activation,
        hidden_dropout=config.hidden_dropout > 0 and any(isinstance(rule, sharding.OverSequence) for rule in rules),
        attention_dropout=config.attention_dropout > 0,
        window=config.window(number),
        experts=mixture,
    )


def _is_layer_norm(described: ModelDescription, name: str) -> bool:
    """Return whether a norm without bias is a LayerNorm, which its shape does not show."""
    if family_of(described.config).shapes is not None:
        return False
    from torch import nn

    return isinstance(described.model.get_submodule(name), nn.LayerNorm)


def _require_known(architecture: str, layer: str, roles: dict[str, list[WeightShape]], cores: int) -> None:
    experts, networks = len(roles["experts"]), len(roles["up"])
    allowed = {"output of attention": 1, "up": 1, "down": networks, "experts": 2, "norm": 2}
    allowed |= dict.fromkeys(("router", "gate of the shared expert"), experts // 2)
    odd = [weight for role, most in allowed.items() if len(roles[role]) > most for weight in roles[role]]
    odd = roles["unknown"] or odd
    parts = {part for weight in roles["projection"] for part in weight.parts}
    if cores != 1 or not roles["output of attention"] or parts != {"query", "key", "value"}:
        lack = "no attention of which the sharding plan names the queries, keys and values"
    elif odd:
        lack = f"{' and '.join(weight.name.removeprefix(f'{layer}.') for weight in odd)} besides or for one of them"
    elif experts not in (0, 2) or not experts + networks or len(roles["down"]) != networks:
        lack = "no such network"
    elif not roles["norm"]:
        lack = "no norm"
    else:
        return
    raise UnknownBlock(
        f"model.architecture is {architecture} but the planner has formulas for blocks of one "
        f"attention and one feed-forward network or mixture of experts, and {layer} has {lack}; use threefold "
        "dry-run, which runs the model."
    )


def _role(weight: WeightShape) -> str:
    """Return the role of a weight in its block, from its rule and its shape."""
    rule, parts, dims = weight.split, weight.parts, len(weight.shape)
    shared_bias = isinstance(rule, sharding.Column | sharding.Row | sharding.Replicated)
    if dims == 1 and weight.last_name == "bias" and shared_bias:
        return "bias"
    if dims == 1 and weight.last_name == "weight" and isinstance(rule, sharding.Replicated | sharding.PerHead):
        return "norm of heads" if isinstance(rule, sharding.PerHead) else "norm"
    if dims == 3 and weight.is_of_experts:
        return "experts"
    if dims != 2:
        return "unknown"
    if isinstance(rule, sharding.Column):
        return "projection" if parts.keys() & {"query", "key", "value"} else "up"
    if isinstance(rule, sharding.Row):
        return "output of attention" if "head" in parts else "down"
    if isinstance(rule, sharding.Replicated):
        return "router" if weight.multiply_adds else "gate of the shared expert"
    return "unknown"

"""One description of a model's layers, derived from the shapes of their weights and the family's sharding plan.

The FLOPs of a step and the planner's formulas use it, so that no family needs formulas of its own. A block of attention
and a feed-forward network or mixture of experts is planned from its weights; any other block is refused in a sentence.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from threefold.config.model import CUSTOM, FAMILIES, ModelConfig
from threefold.doors import call_hook
from threefold.errors import UserError
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
        shape = self.whole_of_expert
        return 0 if len(shape) < 2 or min(self.shape) == 1 else prod(shape)

    @property
    def base(self) -> str:
        """Name of the weight itself, or for a weight of an adapter that of the weight beside it."""
        if not sharding.is_of_adapter(self.name):
            return self.name
        of_expert, found, _ = self.last_name.partition("_lora_")
        return f"{_module(self.name)}.{of_expert if found else 'weight'}"

    @property
    def whole_of_expert(self) -> tuple[int, ...]:
        """Whole shape, without the dim of the experts."""
        return self.shape[1:] if self.is_of_experts else self.shape

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
        if config.architecture == CUSTOM:
            call_hook("check_plan", self.model, self.plan)
        self.weights = {layer: self._weights_of(layer) for layer in self.plan.layers}

    @cached_property
    def flops_per_token(self) -> float:
        """FLOPs of a training step of all weights per token; attention counts all pairs of positions in its window."""
        return self.flops(self.weights, lambda name: True)

    def flops(self, weights: Mapping[str, Sequence[WeightShape]], is_trained: Callable[[str], bool]) -> float:
        """Return the FLOPs per token of a training step that trains some of the weights of each layer.

        A product is two operations in the forward pass, two for the gradient of its weight, if that is trained, and two
        for the gradient of its input, if a trained weight comes before. An adapter's weights stand behind its layer's.
        """
        total, reached = 0, False
        for number, layer in enumerate(self.plan.layers):
            attends, of_part, part = False, reached, ""
            for _, group in groupby(weights[layer], key=lambda weight: weight.base):
                alike, ranks = list(group), 1
                name, first = alike[0].name.removeprefix(f"{layer}.").partition(".")[0], alike[0]
                if name != part:
                    part, of_part = name, reached
                # Several products may take the input of attention, or of the network. Projections of latents count as
                # if those of queries came before those of keys, one product too many in the first trained layer.
                takes_input = first.whole_of_expert[-1] == self.config.hidden_size
                takes_input = takes_input and not isinstance(first.split, sharding.Row)
                before = of_part if takes_input else reached
                trains = any(is_trained(weight.name) for weight in alike)
                for weight in alike:
                    of_adapter = sharding.is_of_adapter(weight.name)
                    counted = prod(weight.whole_of_expert) if of_adapter else weight.multiply_adds
                    if weight.name.endswith(sharding.LORA_A):
                        ranks = weight.whole_of_expert[0]
                    elif weight.name.endswith(sharding.LORA_B):  # one product for all projections of the layer
                        counted = counted // weight.whole_of_expert[1] * ranks
                    if number == 0 and not weight.name.endswith(sharding.TABLE_B):  # a look-up is not a product
                        continue
                    trained = is_trained(weight.name)
                    inner = trained and weight.name.endswith((sharding.LORA_B, sharding.TABLE_B))
                    passes = 1 + (before or inner) + trained
                    total += passes * counted * (self.config.experts_per_token if weight.is_of_experts else 1)
                reached = reached or trains
                if any("key" in weight.parts for weight in alike):
                    attends = reached
            if number:
                total += (3 if attends else 1) * self._attention(number - 1, layer)
        # Of the projections to the vocabulary of further tokens, the table that is looked up again stands for one.
        table = max(0, self.config.mtp_layers - 1) * (self.config.vocab_size or 0) * self.config.hidden_size
        return float(2 * (total + table * (2 + is_trained(weights[self.plan.layers[0]][0].name))))

    def _attention(self, number: int, layer: str) -> int:
        """Return the multiply-adds per token of a layer's attention."""
        window = self.config.window(min(number, len(self.plan.layers) - 3))  # further blocks are like the last one
        seen = min(window or self._length, self._length)
        heads = sum(rule.heads for rule in self.rules(layer) if isinstance(rule, sharding.AttentionCore))
        both = (weight.parts for weight in self.weights[layer] if "key" in weight.parts)
        parts = next(both, {"key": self.config.head_dim, "value": self.config.head_dim})
        return heads * (parts["key"] + self.config.rope_head_dim + parts["value"]) * seen

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
    if config.architecture == CUSTOM:  # the file may change
        return ModelDescription(config, sequence_length)
    return _remembered(config.architecture, config.model_dump_json(exclude_none=True), sequence_length)


@lru_cache(maxsize=16)
def _remembered(family: str, settings: str, sequence_length: int) -> ModelDescription:
    return ModelDescription(FAMILIES.load(family).config.model_validate_json(settings), sequence_length)


def model_flops_per_token(config: ModelConfig, sequence_length: int) -> float | None:
    """Return the FLOPs of a training step per token; None for a custom model, whose operations are not known."""
    if config.architecture == CUSTOM:
        return None
    return describe_model(config, sequence_length).flops_per_token


@dataclass(frozen=True)
class Mixture:
    """Mixture of experts, with the inner features of one expert and of the shared expert (0 for none)."""

    count: int
    per_token: int
    inner: int
    shared: int = 0


@dataclass(frozen=True)
class Latents:
    """Latent attention: widths of the latents of queries (0 for none) and of keys and values, of the part of a head's
    queries and keys that rotates, and of a head's values."""

    queries: int
    keys: int
    rotary: int
    value: int

    @property
    def shared(self) -> int:
        """Numbers per token that the keys and values of all heads come from."""
        return self.keys + self.rotary


_ORDER: Final = ("attn_norm", "qkv", "proj", "mlp_norm", "up", "down")


class AdapterShape(NamedTuple):
    """Adapter of a block's product (a name in `PRODUCTS`): rows of its factor A, and how many of several projections
    have parts of it; 0 for a layer of one."""

    product: str
    rows: int
    parts: int


PRODUCTS: Final = ("qkv", "proj", "up", "down")
"""Products of a block's attention and dense network, in order."""


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """Transformer block of the whole model.

    `frozen` are the `PRODUCTS` and norms (`attn_norm`, `mlp_norm`) without trained weights of their own, `adapters` the
    adapters of products, and a backward pass goes on to the block before if that is `reached`.
    """

    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    ffn: int  # unused with `experts`
    gated: bool = False
    rms: bool = False
    biased: bool = False
    norms: int = 2  # of the residual stream; with 1, a half block has none, with 4 two each
    rotary: bool = False
    qk_norm: bool = False
    qk_norm_over_width: bool = False
    norm_offset: bool = False  # whether norms compute 1 + their weights
    output_gate: bool = False  # of attention
    activation: str = "gelu_tanh"
    hidden_dropout: bool = False
    attention_dropout: bool = False
    window: int = 0  # in positions; 0 for none
    tiled: bool = False  # attention that only tiles compute, with a soft cap or sinks
    latents: Latents | None = None  # each head has keys of its own then
    experts: Mixture | None = None
    frozen: tuple[str, ...] = ()
    adapters: tuple[AdapterShape, ...] = ()
    reached: bool = True

    def trains(self, part: str) -> bool:
        """Return whether a product or norm has a trained weight, which needs its input in the backward pass."""
        return part not in self.frozen or any(part == adapter.product for adapter in self.adapters)

    def reaches(self, part: str) -> bool:
        """Return whether a backward pass computes the gradient of the input of a product or norm."""
        before = _ORDER[: _ORDER.index(part)]
        return self.reached or any(self.trains(each) for each in before)

    @property
    def is_idle(self) -> bool:
        """Whether the block has no backward pass."""
        return not self.reached and not any(self.trains(part) for part in _ORDER)

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.latents.value if self.latents else self.head_dim


class UnknownBlock(UserError):
    """Block for which the planner has no formulas."""


@lru_cache(maxsize=16)
def block_shapes(described: ModelDescription) -> tuple[BlockShape, ...]:
    """Return the layers between the first and the last; raise `UnknownBlock` for one without formulas."""
    return tuple(_described(described, layer, number) for number, layer in enumerate(described.plan.layers[1:-1]))


def trained_blocks(
    described: ModelDescription, weights: Mapping[str, Sequence[WeightShape]], is_trained: Callable[[str], bool]
) -> tuple[BlockShape, ...]:
    """Return the blocks of a model that trains some of its weights; raise `UnknownBlock` for one without formulas.

    `weights` are those of each layer, with those of adapters. Where parts of the network run beside each other, or have
    norms of their own, frozen products count as if they were trained, which is an upper bound of time and memory.
    """
    shapes, found = block_shapes(described), []
    first, *layers, last = described.plan.layers
    for layer in (first, last):
        for weight in weights[layer]:
            if sharding.is_of_adapter(weight.name):
                raise _no_formulas(_module(weight.name))
    reached = any(is_trained(weight.name) for weight in weights[first])
    for layer, shape in zip(layers, shapes, strict=True):
        trained, adapters, known = set[str](), dict[str, AdapterShape](), dict[str, str]()
        norms = iter(("attn_norm", "mlp_norm"))
        roles = {"projection": "qkv", "output of attention": "proj", "up": "up", "down": "down"}
        for weight in weights[layer]:
            module = _module(weight.name)
            if not sharding.is_of_adapter(weight.name):
                role = _role(weight)
                known.setdefault(module, next(norms, "") if role == "norm" else roles.get(role, "qkv"))
                trained |= {known[module]} if is_trained(weight.name) else set()
            elif weight.name.endswith(sharding.MAGNITUDE):
                raise UnknownBlock(
                    "adapter.dora is true but the planner has no formulas for magnitudes of rows; use threefold "
                    "dry-run, which runs the model, or adapter.dora false."
                )
            elif shape.experts or shape.latents:
                raise _no_formulas(module)
            elif weight.name.endswith(sharding.LORA_A):
                adapters[module] = AdapterShape(known[module], weight.shape[0], 0)
            else:
                unit = weight.split.unit if isinstance(weight.split, sharding.Column) else None
                several = unit is not None and len(unit.parts) > 1 and not unit.one_layer
                before = adapters[module]
                if several:
                    adapters[module] = before._replace(parts=before.rows // weight.shape[1])
        if not is_simple(shape, described.config):
            trained, reached = set(_ORDER), True
        frozen = tuple(part for part in _ORDER if part not in trained)
        block = replace(shape, frozen=frozen, adapters=tuple(adapters.values()), reached=reached)
        found.append(block)
        reached = reached or not block.is_idle
    return tuple(found)


def is_simple(shape: BlockShape, config: ModelConfig) -> bool:
    """Return whether a block is two half blocks with a norm before each, and no more."""
    return not shape.experts and not shape.latents and shape.norms == 2 and config.norm_position == "before"


def _no_formulas(module: str) -> UnknownBlock:
    return UnknownBlock(
        f"The adapter of {module} has no formulas in the planner, which knows those of attention and dense networks; "
        "use threefold dry-run, which runs the model, or other adapter.targets."
    )


def further_blocks(described: ModelDescription) -> tuple[BlockShape, ...]:
    """Return the blocks of multi-token prediction in the last layer, each like the last block."""
    return block_shapes(described)[-1:] * described.config.mtp_layers


def _described(described: ModelDescription, layer: str, number: int) -> BlockShape:
    config, rules = described.config, described.rules(layer)
    roles: dict[str, list[WeightShape]] = defaultdict(list)
    has_latents = any(isinstance(rule, sharding.AcrossHeads) for rule in rules)
    around = {_module(_module(weight.name)) for weight in described.weights[layer] if "key" in weight.parts}
    for weight in described.weights[layer]:
        inside = _module(_module(weight.name)) in around and isinstance(weight.split, sharding.Replicated)
        roles["latents" if has_latents and inside else _role(weight)].append(weight)
    cores = [rule for rule in rules if isinstance(rule, sharding.AttentionCore)]
    _require_known(config.architecture, layer, roles, len(cores))
    latents = _latents(roles) if has_latents else None
    projection, down = roles["output of attention"][0], roles["down"]
    heads = {part: size for weight in roles["projection"] for part, size in weight.parts.items()}
    [keys] = {weight.split.units("weight")["tp"].count for weight in roles["projection"] if "key" in weight.parts}
    inner, mixture = down[0].shape[1] if down else 0, None
    if roles["experts"]:
        first, second = roles["experts"]
        mixture = Mixture(first.shape[0], config.experts_per_token, second.shape[2], inner)
    modules = {_module(weight.name) for weight in roles["bias"]}
    norms = [_module(weight.name) for weight in roles["norm"]]
    products = [*roles["projection"], projection, *roles["up"], *down, *roles["experts"]]
    return BlockShape(
        hidden=projection.shape[0],
        heads=cores[0].heads,
        key_heads=keys,
        head_dim=heads["query"] if latents else heads["key"],
        ffn=config.ffn_hidden_size if mixture else inner,
        gated="gate" in (roles["experts"] or roles["up"])[0].parts,
        rms=not any(name in modules or _is_layer_norm(described, name) for name in norms),
        biased=all(_module(weight.name) in modules for weight in products),
        norms=len(norms),
        rotary=any(isinstance(rule, sharding.OverContext) for rule in rules),
        qk_norm=bool(roles["norm of heads"]),
        qk_norm_over_width=any(isinstance(weight.split, sharding.OverWidth) for weight in roles["norm of heads"]),
        norm_offset=config.norm_offset,
        output_gate="query gate" in heads,
        activation=config.activation,
        hidden_dropout=config.hidden_dropout > 0 and any(isinstance(rule, sharding.OverSequence) for rule in rules),
        attention_dropout=config.attention_dropout > 0,
        window=config.window(number),
        tiled=config.attention_softcap > 0 or bool(roles["sinks"]),
        latents=latents,
        experts=mixture,
    )


def _module(name: str) -> str:
    """Return the name of the module around a parameter or module."""
    return name.rpartition(".")[0]


def _latents(roles: dict[str, list[WeightShape]]) -> Latents:
    """Return the widths of latent attention from those of the projections to the latents and to the heads."""
    [query] = [weight for weight in roles["projection"] if "query" in weight.parts]
    [keys] = [weight for weight in roles["projection"] if "key" in weight.parts]
    narrowing = [weight for weight in roles["latents"] if len(weight.shape) == 2]
    rotary = query.parts["query"] - keys.parts["key"]
    return Latents(query.shape[1] if len(narrowing) == 2 else 0, keys.shape[1], rotary, keys.parts["value"])


def _is_layer_norm(described: ModelDescription, name: str) -> bool:
    """Return whether a norm without bias is a LayerNorm, which its shape does not show."""
    if family_of(described.config).shapes is not None:
        return False
    from torch import nn

    return isinstance(described.model.get_submodule(name), nn.LayerNorm)


def _require_known(architecture: str, layer: str, roles: dict[str, list[WeightShape]], cores: int) -> None:
    experts, networks = len(roles["experts"]), len(roles["up"])
    allowed = {"output of attention": 1, "sinks": 1, "up": 1, "down": networks, "experts": 2, "norm": 4}
    allowed |= dict.fromkeys(("router", "gate of the shared expert"), experts // 2)
    odd = [weight for role, most in allowed.items() if len(roles[role]) > most for weight in roles[role]]
    odd = roles["unknown"] or odd
    parts = {part for weight in roles["projection"] for part in weight.parts}
    if cores != 1 or not roles["output of attention"] or parts - {"query gate"} != {"query", "key", "value"}:
        lack = "no attention of which the sharding plan names the queries, keys and values"
    elif roles["latents"] and (len(roles["projection"]), len(roles["latents"])) not in ((2, 2), (2, 4)):
        lack = "no latent of keys and values, and at most one of queries, each with a norm"
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
    if isinstance(rule, sharding.AttentionCore):
        return "sinks"
    if weight.is_of_experts:
        return "experts" if dims == 3 else "bias"
    if dims != 2:
        return "unknown"
    if isinstance(rule, sharding.Column):
        return "projection" if parts.keys() & {"query", "key", "value"} else "up"
    if isinstance(rule, sharding.Row):
        return "output of attention" if "head" in parts else "down"
    if isinstance(rule, sharding.Replicated):
        return "router" if weight.multiply_adds else "gate of the shared expert"
    return "unknown"

"""Sharding of Llama's weights, and the costs and parameter shapes of its layers."""

from collections.abc import Callable
from typing import TypeVar

from threefold.models import sharding
from threefold.models.family import Shapes
from threefold.models.layers.mixture_config import MixtureConfig
from threefold.models.llama import LlamaConfig
from threefold.models.plan import decoder_plan

Config = TypeVar("Config", bound=MixtureConfig)
_GATED = (("gate", 1), ("up", 1))


def llama_plan(config: LlamaConfig, sequence_length: int) -> sharding.ModelPlan:
    """Return the sharding plan of `Llama` (`model.py`); the tokens of a sample determine the cost of attention."""
    heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    queries = heads // groups * d
    gates = (("query gate", queries),) if config.attention_gate else ()
    group = (("query", queries), *gates, ("key", d), ("value", d))  # the rows of a GQA group
    over_width = config.qk_norm and config.qk_norm_over == "width"
    split: dict[str, sharding.Split] = {
        "blocks.*.attn.proj": sharding.Row(sharding.Unit("num_attention_heads", heads, (("head", d),))),
        "blocks.*.attn.qkv": sharding.Column(
            sharding.Unit("num_key_value_heads", groups, group, repeated=("key", "value"))
        ),
        "blocks.*.attn.q_norm": sharding.OverWidth(heads) if over_width else sharding.PerHead(),
        "blocks.*.attn.k_norm": sharding.OverWidth(groups) if over_width else sharding.PerHead(),
        "blocks.*.attn.rotary": sharding.OverContext(),
        "blocks.*.attn.core": sharding.AttentionCore(heads),
        **block_split(config),
    }
    costs = []  # multiply-adds per token
    for layer in range(config.num_layers):
        seen = min(config.window(layer) or sequence_length, sequence_length)
        projected = (3 if gates else 2) * heads + 2 * groups
        costs.append(d * (config.hidden_size * projected + heads * seen) + mlp_cost(config, layer))
    return decoder_plan(config, split, costs)


# The rest is of all families whose blocks are Llama's but for their attention.


def block_split(config: MixtureConfig) -> dict[str, sharding.Split]:
    """Return the rules of a model's modules outside of attention."""
    return {
        "embed.tokens": sharding.Vocab(),
        "embed.dropout": sharding.OverSequence(),
        "blocks.*.attn_norm": sharding.Replicated(),
        "blocks.*.attn_out_norm": sharding.Replicated(),
        "blocks.*.mlp_norm": sharding.Replicated(),
        "blocks.*.mlp_out_norm": sharding.Replicated(),
        **_mlp_split(config),
        "blocks.*.dropout.*": sharding.OverSequence(),
        "head.norm": sharding.Replicated(),
        "head.output": sharding.Column(),
        "head.loss.cross_entropy": sharding.VocabLoss(config.vocab_size),
    }


def mlp_cost(config: MixtureConfig, layer: int) -> int:
    """Return the multiply-adds of a token in a layer's feed-forward network or mixture of experts."""
    inner, experts = config.ffn_hidden_size, 0
    if config.has_experts(layer):
        inner = config.experts_per_token * config.expert_ffn_hidden_size + config.shared_expert_ffn_hidden_size
        experts = config.num_experts
    return config.hidden_size * (3 * inner + experts)


def _mlp_split(config: MixtureConfig) -> dict[str, sharding.Split]:
    split: dict[str, sharding.Split] = {}
    mixtures = [config.has_experts(layer) for layer in range(config.num_layers)]
    if not all(mixtures):
        split |= _gated("blocks.*.mlp", "ffn_hidden_size", config.ffn_hidden_size)
    if any(mixtures):
        split |= {
            "blocks.*.mlp.router": sharding.Replicated(),
            "blocks.*.mlp.routing": sharding.TokenRouting(config.num_experts, config.router_bias_rate),
            "blocks.*.mlp.experts": sharding.OverExperts(
                sharding.Unit("num_experts", config.num_experts),
                sharding.Unit("expert_ffn_hidden_size", config.expert_ffn_hidden_size, _GATED),
            ),
        }
        if shared := config.shared_expert_ffn_hidden_size:
            split |= _gated("blocks.*.mlp.shared", "shared_expert_ffn_hidden_size", shared)
        if config.shared_expert_gate:
            split |= {"blocks.*.mlp.shared_gate": sharding.Replicated()}
    return split


def _gated(name: str, setting: str, inner: int) -> dict[str, sharding.Split]:
    return {
        f"{name}.gate_up": sharding.Column(sharding.Unit(setting, inner, _GATED)),
        f"{name}.down": sharding.Row(sharding.Unit(setting, inner)),
    }


def layer_shapes(config: LlamaConfig, layer: str) -> Shapes:
    """Return the shape of each parameter of the layer with this name, in order, by its name in the layer."""
    if not layer.startswith("blocks."):
        return outer_shapes(config, layer, layer_shapes)
    hidden = config.hidden_size
    queries, keys = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
    rows = queries * (2 if config.attention_gate else 1) + 2 * keys
    normed = (queries, keys) if config.qk_norm_over == "width" else (config.head_dim, config.head_dim)
    heads = {"attn.q_norm.weight": normed[:1], "attn.k_norm.weight": normed[1:]}
    number, position = int(layer.rpartition(".")[2]), config.norm_position
    return {
        **({"attn_norm.weight": (hidden,)} if position != "after" else {}),
        "attn.qkv.weight": (rows, hidden),
        **({"attn.qkv.bias": (rows,)} if config.qkv_bias else {}),
        **(heads if config.qk_norm else {}),
        **({"attn.core.sinks": (config.num_attention_heads,)} if config.attention_sinks else {}),
        "attn.proj.weight": (hidden, queries),
        **({"attn.proj.bias": (hidden,)} if config.proj_bias else {}),
        **({"attn_out_norm.weight": (hidden,)} if position != "before" else {}),
        **({"mlp_norm.weight": (hidden,)} if position != "after" else {}),
        **mlp_shapes(config, number),
        **({"mlp_out_norm.weight": (hidden,)} if position != "before" else {}),
    }


def outer_shapes(config: Config, layer: str, of_layer: Callable[[Config, str], Shapes]) -> Shapes:
    """Return the shapes of the first or the last layer's parameters, as `layer_shapes`, given as `of_layer`, does."""
    hidden = config.hidden_size
    table = {"tokens.weight": (config.vocab_size, hidden)}
    if layer == "embed":
        return table
    shapes = {"norm.weight": (hidden,), "output.weight": (config.vocab_size, hidden)}
    if not config.mtp_layers:
        return shapes
    block = of_layer(config, f"blocks.{config.num_layers - 1}")
    depth = {
        "embed_norm.weight": (hidden,),
        "hidden_norm.weight": (hidden,),
        "join.weight": (hidden, 2 * hidden),
        **{f"block.{name}": shape for name, shape in block.items()},
        "norm.weight": (hidden,),
    }
    further = {f"depths.{number}.{name}": depth[name] for number in range(config.mtp_layers) for name in depth}
    return shapes | table | further


def mlp_shapes(config: MixtureConfig, layer: int) -> Shapes:
    """Return the shapes of the parameters of a layer's feed-forward network or mixture of experts."""
    if not config.has_experts(layer):
        return _gated_shapes("mlp", config.hidden_size, config.ffn_hidden_size)
    hidden, experts, inner = config.hidden_size, config.num_experts, config.expert_ffn_hidden_size
    shared, biases = config.shared_expert_ffn_hidden_size, {"gate_up": 2 * inner, "down": hidden}
    return {
        "mlp.router.weight": (experts, hidden),
        **({"mlp.router.bias": (experts,)} if config.router_bias else {}),
        "mlp.experts.gate_up": (experts, 2 * inner, hidden),
        "mlp.experts.down": (experts, hidden, inner),
        **(
            {f"mlp.experts.{name}_bias": (experts, size) for name, size in biases.items()} if config.expert_bias else {}
        ),
        **(_gated_shapes("mlp.shared", hidden, shared) if shared else {}),
        **({"mlp.shared_gate.weight": (1, hidden)} if config.shared_expert_gate else {}),
    }


def _gated_shapes(name: str, hidden: int, inner: int) -> Shapes:
    return {f"{name}.gate_up.weight": (2 * inner, hidden), f"{name}.down.weight": (hidden, inner)}

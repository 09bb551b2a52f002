"""Sharding of DeepSeek's weights, and the costs and parameter shapes of its layers.

Latents are whole on every tensor rank, or of its shard of the sequence; the projections from them are cut by head.
"""

from threefold.models import sharding
from threefold.models.deepseek import DeepseekConfig
from threefold.models.family import Shapes
from threefold.models.llama.sharding import block_split, mlp_cost, mlp_shapes, outer_shapes
from threefold.models.plan import decoder_plan


def deepseek_plan(config: DeepseekConfig, sequence_length: int) -> sharding.ModelPlan:
    """Return the sharding plan of `Deepseek`; the tokens of a sample determine the cost of attention."""
    heads, plain, value = config.num_attention_heads, config.plain_head_dim, config.value_head_dim

    def unit(*parts: tuple[str, int]) -> sharding.Unit:
        return sharding.Unit("num_attention_heads", heads, parts, one_layer=True)

    narrow = {"blocks.*.attn.q_down": sharding.Replicated(), "blocks.*.attn.q_norm": sharding.Replicated()}
    split: dict[str, sharding.Split] = {
        **(narrow if config.query_rank else {}),
        "blocks.*.attn.q": sharding.Column(unit(("query", config.head_dim))),
        "blocks.*.attn.rotary": sharding.OverContext(),
        "blocks.*.attn.kv_down": sharding.Replicated(),
        "blocks.*.attn.kv_norm": sharding.Replicated(),
        "blocks.*.attn.key_rotary": sharding.OverSequence(),
        "blocks.*.attn.shared": sharding.AcrossHeads(),
        "blocks.*.attn.kv": sharding.Column(unit(("key", plain), ("value", value)), sums_input_gradient=False),
        "blocks.*.attn.core": sharding.AttentionCore(heads),
        "blocks.*.attn.proj": sharding.Row(unit(("head", value))),
        **block_split(config),
    }
    shapes = _attention_shapes(config)
    products = sum(rows * columns for rows, columns in (each for each in shapes.values() if len(each) == 2))
    seen = heads * sequence_length * (config.head_dim + value) // 2  # half of all pairs
    costs = [products + seen + mlp_cost(config, layer) for layer in range(config.num_layers)]
    return decoder_plan(config, split, costs)


def layer_shapes(config: DeepseekConfig, layer: str) -> Shapes:
    """Return the shape of each parameter of the layer with this name, in order, by its name in the layer."""
    if not layer.startswith("blocks."):
        return outer_shapes(config, layer, layer_shapes)
    number = int(layer.rpartition(".")[2])
    norm = (config.hidden_size,)
    return {
        "attn_norm.weight": norm,
        **_attention_shapes(config),
        "mlp_norm.weight": norm,
        **mlp_shapes(config, number),
    }


def _attention_shapes(config: DeepseekConfig) -> Shapes:
    hidden, heads, narrow, rank = (
        config.hidden_size,
        config.num_attention_heads,
        config.query_rank,
        config.key_value_rank,
    )
    down = {"attn.q_down.weight": (narrow, hidden), "attn.q_norm.weight": (narrow,)}
    return {
        **(down if narrow else {}),
        "attn.q.weight": (heads * config.head_dim, narrow or hidden),
        "attn.kv_down.weight": (rank + config.rope_head_dim, hidden),
        "attn.kv_norm.weight": (rank,),
        "attn.kv.weight": (heads * (config.plain_head_dim + config.value_head_dim), rank),
        "attn.proj.weight": (hidden, heads * config.value_head_dim),
    }

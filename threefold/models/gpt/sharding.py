"""Sharding of GPT's weights, and the costs and parameter shapes of its layers."""

from threefold.config import ModelConfig
from threefold.models import sharding
from threefold.models.family import Shapes
from threefold.models.gpt import GPTConfig
from threefold.models.plan import decoder_plan


def gpt_plan(config: ModelConfig, sequence_length: int) -> sharding.ModelPlan:
    """Return the sharding plan of `GPT` (`model.py`); the tokens of a sample determine the cost of attention."""
    heads, d = config.num_attention_heads, config.head_dim
    inner = sharding.Unit("ffn_hidden_size", config.ffn_hidden_size)
    learned = config.position_embedding == "learned"
    positions: dict[str, sharding.Split] = (
        {"embed.positions": sharding.OverSequence()} if learned else {"blocks.*.attn.rotary": sharding.OverContext()}
    )
    split: dict[str, sharding.Split] = {
        **positions,
        "embed.tokens": sharding.Vocab(),
        "embed.dropout": sharding.OverSequence(),
        "blocks.*.attn_norm": sharding.Replicated(),
        "blocks.*.attn.qkv": sharding.Column(
            sharding.Unit("num_attention_heads", heads, (("query", d), ("key", d), ("value", d)), one_layer=True)
        ),
        "blocks.*.attn.core": sharding.AttentionCore(heads),
        "blocks.*.attn.proj": sharding.Row(sharding.Unit("num_attention_heads", heads, (("head", d),))),
        "blocks.*.mlp_norm": sharding.Replicated(),
        "blocks.*.mlp.up": sharding.Column(inner),
        "blocks.*.mlp.down": sharding.Row(inner),
        "blocks.*.dropout.*": sharding.OverSequence(),
        "head.norm": sharding.Replicated(),
        "head.output": sharding.Column(),
        "head.loss.cross_entropy": sharding.VocabLoss(config.vocab_size),
    }
    # Multiply-adds per token.
    cost = config.hidden_size * (4 * config.hidden_size + 2 * config.ffn_hidden_size + sequence_length)
    return decoder_plan(config, split, [cost] * config.num_layers)


def layer_shapes(config: GPTConfig, layer: str) -> Shapes:
    """Return the shape of each parameter of the layer with this name, in order, by its name in the layer."""
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    if layer == "embed":
        positions = {"positions.weight": (config.max_position_embeddings, hidden)}
        return {
            "tokens.weight": (config.vocab_size, hidden),
            **(positions if config.position_embedding == "learned" else {}),
        }
    if layer == "head":
        return {**_norm("norm", hidden), "output.weight": (config.vocab_size, hidden)}
    return {
        **_norm("attn_norm", hidden),
        **_linear("attn.qkv", hidden, 3 * hidden),
        **_linear("attn.proj", hidden, hidden),
        **_norm("mlp_norm", hidden),
        **_linear("mlp.up", hidden, ffn),
        **_linear("mlp.down", ffn, hidden),
    }


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

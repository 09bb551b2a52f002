"""How GPT's weights are cut, what its layers cost, and what its weights start from."""

from threefold.config import ModelConfig
from threefold.models.decoder_plan import decoder_plan
from threefold.models.sharding import (
    AttentionCore,
    Column,
    ModelPlan,
    OverContext,
    OverSequence,
    Replicated,
    Row,
    Split,
    Unit,
    Vocab,
    VocabLoss,
)


def gpt_plan(config: ModelConfig, sequence_length: int) -> ModelPlan:
    """The plan of `models.gpt.GPT`.

    Args:
        config: the model's sizes.
        sequence_length: tokens per sample, for what attention costs.
    """
    heads, d = config.num_attention_heads, config.head_dim
    inner = Unit("ffn_hidden_size", config.ffn_hidden_size)
    learned = config.position_embedding == "learned"
    positions: dict[str, Split] = (
        {"embed.positions": OverSequence()} if learned else {"blocks.*.attn.rotary": OverContext()}
    )
    split: dict[str, Split] = {
        **positions,
        "embed.tokens": Vocab(),
        "embed.dropout": OverSequence(),
        "blocks.*.attn_norm": Replicated(),
        "blocks.*.attn.qkv": Column(Unit("num_attention_heads", heads, (("query", d), ("key", d), ("value", d)))),
        "blocks.*.attn.core": AttentionCore(heads),
        "blocks.*.attn.proj": Row(Unit("num_attention_heads", heads, (("head", d),))),
        "blocks.*.mlp_norm": Replicated(),
        "blocks.*.mlp.up": Column(inner),
        "blocks.*.mlp.down": Row(inner),
        "blocks.*.dropout.*": OverSequence(),
        "head.norm": Replicated(),
        "head.output": Column(),
        "head.loss.cross_entropy": VocabLoss(config.vocab_size),
    }
    # Multiply-adds per token.
    cost = config.hidden_size * (4 * config.hidden_size + 2 * config.ffn_hidden_size + sequence_length)
    return decoder_plan(config, split, [cost] * config.num_layers)

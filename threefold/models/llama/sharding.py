"""How Llama's weights are cut, and what its layers cost."""

from threefold.config import ModelConfig
from threefold.models.decoder_plan import decoder_plan
from threefold.models.sharding import (
    AttentionCore,
    Column,
    ModelPlan,
    OverContext,
    OverExperts,
    OverRegion,
    OverSequence,
    PerHead,
    Replicated,
    Row,
    Split,
    Vocab,
    VocabLoss,
)


def llama_plan(config: ModelConfig, sequence_length: int) -> ModelPlan:
    """The plan of `models.llama.Llama`.

    Args:
        config: the model's sizes.
        sequence_length: tokens per sample, for what attention costs.
    """
    split: dict[str, Split] = {
        "embed.tokens": Vocab(),
        "embed.dropout": OverSequence(),
        "blocks.*.attn_norm": Replicated(),
        "blocks.*.attn.qkv": Column(),
        "blocks.*.attn.q_norm": PerHead(),
        "blocks.*.attn.k_norm": PerHead(),
        "blocks.*.attn.rotary": OverContext(),
        "blocks.*.attn.core": AttentionCore(config.num_attention_heads),
        "blocks.*.attn.proj": Row(),
        "blocks.*.mlp_norm": Replicated(),
        **_mlp_split(config),
        "blocks.*.dropout.*": OverSequence(),
        "head.norm": Replicated(),
        "head.output": Column(),
        "head.loss.cross_entropy": VocabLoss(config.vocab_size),
    }
    layers = range(config.num_layers)
    costs = [_attention_cost(config, layer, sequence_length) + _mlp_cost(config, layer) for layer in layers]
    return decoder_plan(config, split, costs)


def _mlp_split(config: ModelConfig) -> dict[str, Split]:
    """How the feed-forward networks that the model has are cut."""
    split: dict[str, Split] = {}
    mixtures = [config.has_experts(layer) for layer in range(config.num_layers)]
    if not all(mixtures):
        split |= {"blocks.*.mlp.gate_up": Column(), "blocks.*.mlp.down": Row()}
    if any(mixtures):
        split |= {
            "blocks.*.mlp.router": Replicated(),
            "blocks.*.mlp.routing": OverRegion(),
            "blocks.*.mlp.experts": OverExperts(),
        }
        if config.shared_expert_ffn_hidden_size:
            split |= {"blocks.*.mlp.shared.gate_up": Column(), "blocks.*.mlp.shared.down": Row()}
        if config.shared_expert_gate:
            split |= {"blocks.*.mlp.shared_gate": Replicated()}
    return split


def _attention_cost(config: ModelConfig, layer: int, sequence_length: int) -> int:
    """Multiply-adds per token."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    seen = min(config.window(layer) or sequence_length, sequence_length)
    return config.head_dim * (config.hidden_size * (2 * heads + 2 * groups) + heads * seen)


def _mlp_cost(config: ModelConfig, layer: int) -> int:
    """Multiply-adds per token."""
    if not config.has_experts(layer):
        return 3 * config.hidden_size * config.ffn_hidden_size
    inner = config.experts_per_token * config.expert_ffn_hidden_size + config.shared_expert_ffn_hidden_size
    return config.hidden_size * (3 * inner + config.num_experts)

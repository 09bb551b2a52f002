"""The sizes of a block on a rank, from a config."""

from typing import Final

from threefold.config import Config
from threefold.plan.activations import Attention, BlockSizes, ExpertSizes

_LONGEST_PLAIN: Final = 512
"""Tokens up to which bf16 attention on a CPU keeps its weights (`kernels`), and attention with dropout does."""


def block_sizes(config: Config, device: str, layer: int) -> BlockSizes:
    """A rank's sizes of a block, for the formulas of `plan.activations`.

    Args:
        config: resolved.
        device: `cpu` or `cuda`.
        layer: number of the block.
    """
    model, parallel, data = config.model, config.parallel, config.data
    llama, itemsize = model.architecture == "llama", config.precision.itemsize
    attention: Attention = "fused"
    tiled = data.separate_documents or 0 < model.window(layer) < data.sequence_length
    short = not tiled and data.sequence_length <= _LONGEST_PLAIN
    if model.attention_dropout:
        attention = "dropped" if short else "dropped again"
    elif device == "cpu" and config.precision.dtype == "bf16" and short:
        attention = "plain"
    experts = None
    if model.has_experts(layer):
        shared = model.shared_expert_ffn_hidden_size
        inner = model.expert_ffn_hidden_size
        experts = ExpertSizes(
            model.num_experts,
            model.experts_per_token,
            inner,
            shared,
            parallel.ep > 1,
            -(-model.num_experts // parallel.ep),
        )
    return BlockSizes(
        samples=config.train.micro_batch_size,
        positions=data.sequence_length,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        ffn=model.ffn_hidden_size,
        itemsize=itemsize,
        hidden_dropout=model.hidden_dropout > 0,
        attention=attention,
        tp=parallel.tp,
        cp=parallel.cp,
        sequence_parallel=parallel.sequence_parallel,
        head_dim=model.head_dim if llama else 0,
        key_heads=model.num_key_value_heads if llama else 0,
        rotary=model.position_embedding == "rope",
        activation=model.activation,
        llama=llama,
        head_norms=model.qk_norm,
        documents=data.separate_documents,
        experts=experts,
    )

"""The sizes of a block on a rank, from a config."""

from typing import Final

from threefold.config import Config
from threefold.plan.activations import Attention, BlockSizes, ExpertSizes

_LONGEST_PLAIN: Final = 512
"""Tokens up to which bf16 attention on a CPU keeps its weights (`kernels`)."""


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
    masked = data.separate_documents or model.window(layer) > 0
    grouped = llama and model.num_key_value_heads < model.num_attention_heads
    if model.attention_dropout or (device == "cuda" and masked and grouped):  # no fused kernel of a GPU does both
        attention = "dropped"
    elif device == "cpu" and config.precision.dtype == "bf16" and data.sequence_length <= _LONGEST_PLAIN:
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
        masked=masked,
        experts=experts,
    )

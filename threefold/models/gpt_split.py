"""How GPT's weights are cut, what its layers cost, and what its weights start from."""

from threefold.config import ModelConfig
from threefold.models.initial import initial_values
from threefold.parallel.split import (
    AttentionCore,
    Column,
    ModelPlan,
    OverContext,
    OverSequence,
    Replicated,
    Row,
    Split,
    Vocab,
    VocabLoss,
)


def gpt_plan(config: ModelConfig, sequence_length: int) -> ModelPlan:
    """The plan of `models.gpt.GPT`.

    Args:
        config: the model's sizes.
        sequence_length: tokens per sample, for what attention costs.
    """
    layers, hidden = config.num_layers, config.hidden_size
    split: dict[str, Split] = {
        "embed.tokens": Vocab(),
        "embed.positions": OverSequence(),
        "embed.dropout": OverSequence(),
        "blocks.*.attn_norm": Replicated(),
        "blocks.*.attn.qkv": Column(),
        "blocks.*.attn.rotary": OverContext(),
        "blocks.*.attn.core": AttentionCore(config.num_attention_heads),
        "blocks.*.attn.proj": Row(),
        "blocks.*.mlp_norm": Replicated(),
        "blocks.*.mlp.up": Column(),
        "blocks.*.mlp.down": Row(),
        "blocks.*.dropout.*": OverSequence(),
        "head.norm": Replicated(),
        "head.output": Column(),
        "head.loss.cross_entropy": VocabLoss(config.vocab_size),
    }
    # Multiply-adds per token; a look-up has none, but its gradient and its memory traffic are not free.
    block = hidden * (4 * hidden + 2 * config.ffn_hidden_size + sequence_length)
    costs = (config.vocab_size * hidden / 16, *[block] * layers, config.vocab_size * hidden)
    return ModelPlan(
        split=split,
        layers=("embed", *(f"blocks.{number}" for number in range(layers)), "head"),
        costs=tuple(float(cost) for cost in costs),
        initial=lambda name: initial_values(name, config),
        kinds=("Input", *["Block"] * layers, "Head"),
        ties={"head.output.weight": "embed.tokens.weight"} if config.tie_embeddings else {},
        recompute={"selective": ("blocks.*.attn.core",), "full": ("blocks.*",)},
    )

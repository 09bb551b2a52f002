"""A user's own model: RMSNorm, attention without positions, a gated (SwiGLU) feed-forward network, no biases.

Written for one device; the table below it tells Threefold how to shard it. To try it, see README.md beside this file.
"""

from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional as F

from threefold.config import ModelConfig
from threefold.models.layers.attention import CausalAttention
from threefold.models.layers.decoder import NOTHING, CrossEntropy, SampleInfo
from threefold.models.sharding import (
    AttentionCore,
    Column,
    Constant,
    ModelPlan,
    Normal,
    Replicated,
    Row,
    Vocab,
    VocabLoss,
)


class Embed(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, tokens: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        return self.tokens(tokens)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.ffn_hidden_size
        self.head_dim = width // config.num_attention_heads
        self.norm = nn.ModuleDict({name: nn.RMSNorm(width) for name in ("attention", "mlp")})
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.core = CausalAttention()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        y = self.norm["attention"](x)
        heads = (linear(y).unflatten(-1, (-1, self.head_dim)) for linear in (self.query, self.key, self.value))
        x = x + self.out(self.core(*heads, samples))
        y = self.norm["mlp"](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Head(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss = CrossEntropy()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.output(self.norm(x))
        return logits if labels is None else self.loss(logits, labels).sum()


class Model(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed = Embed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = Head(config)
        self.head.output.weight = self.embed.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None, samples: SampleInfo = NOTHING) -> Tensor:
        x = self.embed(tokens, samples)
        for block in self.blocks:
            x = block(x, samples)
        return self.head(x, labels)


def make_model(config: ModelConfig) -> Model:
    """Build the model from the `model` section of the config; `threefold verify --model` calls it."""
    return Model(config)


def plan(config: ModelConfig) -> ModelPlan:
    """Return how the model is sharded: a line for each kind of weight."""
    blocks = [f"blocks.{number}" for number in range(config.num_layers)]
    width, inner = config.hidden_size, config.ffn_hidden_size
    return ModelPlan(
        split={
            "embed.tokens": Vocab(),
            "blocks.*.norm": Replicated(),
            **{f"blocks.*.{name}": Column() for name in ("query", "key", "value", "gate", "up")},
            "blocks.*.core": AttentionCore(config.num_attention_heads),
            **{f"blocks.*.{name}": Row() for name in ("out", "down")},
            "head.norm": Replicated(),
            "head.output": Column(),
            "head.loss": VocabLoss(config.vocab_size),
        },
        layers=("embed", *blocks, "head"),
        costs=(width, *[4 * width * width + 3 * width * inner] * len(blocks), width * config.vocab_size),
        initial=lambda name: Constant(1.0) if "norm" in name else Normal(config.initializer_range),
        ties={"head.output.weight": "embed.tokens.weight"},
        recompute={"selective": ("blocks.*.core",), "full": ("blocks.*",)},
    )


def plan_without_tie(config: ModelConfig) -> ModelPlan:
    """Return a wrong plan that trains without an error: it omits that the head shares the embedding's weight."""
    return replace(plan(config), ties={})

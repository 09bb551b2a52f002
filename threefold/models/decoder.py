"""What all decoders are: an embedding, blocks of one kind after another, a head."""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from threefold.config import ModelConfig
from threefold.models.initial_weights import initial_values
from threefold.models.layers.basic import Linear, LinearCrossEntropy
from threefold.models.layers.sample_info import NOTHING, Samples
from threefold.parallel.split import ModelPlan, Split
from threefold.random.philox import name_sites


class Head(nn.Module):
    """Final norm, projection to the vocabulary and loss.

    Args:
        norm: of the family.
        config: the sizes.
    """

    def __init__(self, norm: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        self.norm = norm
        self.output = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss = LinearCrossEntropy()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """[B, S, H] → logits [B, S, V], or with `labels` [B, S] the sum of the losses of the tokens that count."""
        x = self.norm(x)
        return self.output(x) if labels is None else self.loss(x, self.output, labels).sum()


class Decoder(nn.Module):
    """A whole model.

    Args:
        embed: int64 [B, S] → [B, S, H]; has the table `tokens`.
        blocks: [B, S, H] → [B, S, H] each.
        head: to logits or the loss.
        tied: whether the head shares the table's weight.
    """

    def __init__(self, embed: nn.Module, blocks: Iterable[nn.Module], head: Head, tied: bool) -> None:
        super().__init__()
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)
        self.head = head
        if tied:
            self.head.output.weight = self.embed.get_submodule("tokens").weight  # type: ignore[assignment]
        name_sites(self)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, samples: Samples = NOTHING) -> Tensor:
        """Logits, or the summed loss.

        Args:
            tokens: int64 [B, S].
            labels: int64 [B, S], -100 where a token does not count; None for logits.
            samples: their dropout keys, if anything is to be dropped, and their documents, if attention keeps to them.

        Returns:
            logits [B, S, V], or a scalar: the sum over the tokens that count.
        """
        x = self.embed(tokens, samples)
        for block in self.blocks:
            x = block(x, samples)
        out: Tensor = self.head(x, labels)
        return out


def decoder_plan(config: ModelConfig, split: Mapping[str, Split], block_costs: Sequence[int]) -> ModelPlan:
    """The plan of a `Decoder`.

    Args:
        config: its sizes.
        split: how its weights are cut.
        block_costs: multiply-adds per token of each block.
    """
    layers, table = config.num_layers, config.vocab_size * config.hidden_size
    # A look-up has no multiply-adds, but its gradient and its memory traffic are not free.
    costs = (table / 16, *block_costs, table)
    return ModelPlan(
        split=split,
        layers=("embed", *(f"blocks.{number}" for number in range(layers)), "head"),
        costs=tuple(float(cost) for cost in costs),
        initial=lambda name: initial_values(name, config),
        kinds=("Input", *["Block"] * layers, "Head"),
        ties={"head.output.weight": "embed.tokens.weight"} if config.tie_embeddings else {},
        recompute={"selective": ("blocks.*.attn.core",), "full": ("blocks.*",)},
    )

"""Settings of low-rank adapters (LoRA)."""

from typing import Any

from pydantic import Field

from threefold.config.section import Section, derived


class AdapterConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): trained factors beside weights that keep their values."""

    rank: int = Field(default=0, ge=0, le=1 << 16)
    """Rank of the adapters: a layer W·x becomes W·x + s·B·A·x, with `rank` rows in A and columns in B. All other
    weights are frozen: without gradients and optimizer state. 0 for none (docs/adapters.md)."""
    alpha: float = derived(gt=0)
    """Numerator of the factor s = `alpha` / `rank`. Default: `rank`, so that s is 1."""
    targets: list[str] = derived(examples=['["blocks.*.attn.qkv.query", "blocks.*.mlp.**"]'])
    """Patterns of the layers that get an adapter: linear layers, embeddings and experts, or one of the projections that
    a layer computes, such as `blocks.*.attn.qkv.query` (`key`, `value`) or `blocks.*.mlp.gate_up.gate` (`up`). `*`
    stands for one part of a name, `**` for several. Default: the linear layers and experts between the model's first
    and last layer that tensor parallelism shards."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of an adapter's input; embeddings have none."""
    rank_stabilized: bool = False
    """Whether s is `alpha` / √`rank` (rsLoRA, arXiv 2312.03732), which suits large ranks."""
    dora: bool = False
    """Whether each row of a weight with an adapter also has a trained magnitude (DoRA, arXiv 2402.09353): W becomes
    m·(W + s·B·A) / ‖W + s·B·A‖, row by row, with m = ‖W‖ at first. Not for experts and embeddings."""

    @property
    def factor(self) -> float:
        """Factor s of the products."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)

    def settings(self) -> dict[str, Any]:
        """Return the settings that have a value; none if all have their defaults."""
        found = super().settings()
        return {} if self == type(self)() else found

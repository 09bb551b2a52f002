"""What the seconds of a layer depend on: the sizes of a layer on a rank, as numbers alone."""

from dataclasses import dataclass
from typing import Final

from threefold.config import Config
from threefold.plan.cost.collectives import Group
from threefold.plan.cost.system import System

ALONE: Final = Group(1, 1, 8)
"""The group of an axis of one rank."""
ITEMSIZES: Final = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Name of a dtype → bytes of an element."""


@dataclass(frozen=True)
class ExpertShape:
    """The experts in the place of a block's feed-forward network.

    Attributes:
        count: how many there are.
        per_token: how many each token is sent to.
        inner: features inside each.
        shared: features inside the one that every token goes through; 0 for none.
    """

    count: int
    per_token: int
    inner: int
    shared: int = 0


@dataclass(frozen=True)
class BlockShape:
    """A transformer block as one rank computes it for one micro-batch.

    Attributes:
        samples: of a micro-batch.
        length: positions of a sequence, over all context ranks.
        hidden, heads, key_heads, head_dim, ffn: sizes of the whole model.
        gated: whether the feed-forward network is.
        rms: whether norms are of the root mean square.
        biased: whether products add a bias to each of their outputs.
        rotary: whether positions are.
        qk_norm: whether queries and keys are normalised.
        hidden_dropout, attention_dropout: whether there is any.
        window: positions that a token attends to; 0 for all.
        experts: in the place of the feed-forward network.
        dtype: of the computation.
        itemsize: bytes of its elements.
        sequence_parallel: whether activations between the split layers are sharded along the sequence.
        ring: whether context parallelism passes keys and values around, instead of gathering them.
        tp, cp, ep: the ranks of these axes, and where they are.
    """

    samples: int
    length: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    ffn: int
    gated: bool = False
    rms: bool = False
    biased: bool = False
    rotary: bool = False
    qk_norm: bool = False
    hidden_dropout: bool = False
    attention_dropout: bool = False
    window: int = 0
    experts: ExpertShape | None = None
    dtype: str = "bf16"
    itemsize: int = 2
    sequence_parallel: bool = False
    ring: bool = False
    tp: Group = ALONE
    cp: Group = ALONE
    ep: Group = ALONE

    @property
    def tokens(self) -> int:
        """Of a micro-batch on a rank."""
        return self.samples * self.length // self.cp.ranks

    @property
    def own_tokens(self) -> int:
        """Of them, those that the rank has between the split layers."""
        return self.tokens // self.tp.ranks if self.sequence_parallel else self.tokens

    @property
    def own_heads(self) -> int:
        return max(1, self.heads // self.tp.ranks)

    @property
    def own_key_heads(self) -> int:
        """The rank's heads of keys and values; one where it shares one with others."""
        return max(1, self.key_heads // self.tp.ranks)

    @property
    def seen(self) -> float:
        """Positions that a token attends to on average."""
        window = min(self.window or self.length, self.length)
        return window * (1 - window / (2 * self.length))


@dataclass(frozen=True)
class EndShapes:
    """The embedding and the head as one rank computes them for one micro-batch.

    Attributes:
        vocab: rows of the whole table.
        chunk_size: as `train.loss_chunk_size`.
        block: of the model's blocks.
    """

    vocab: int
    block: BlockShape
    chunk_size: int = 0


def axis_group(config: Config, axis: str, per_node: int, system: System) -> Group:
    """Where the ranks of an axis are in the world, as the mesh orders them (dp × pp × cp × tp).

    Args:
        config: resolved.
        axis: `tp`, `cp`, `pp`, `dp`, `ep` or `dp·cp`.
        per_node: ranks of a node.
        system: which may order data and pipeline the other way.
    """
    parallel = config.parallel
    inner = parallel.tp * parallel.cp
    data, stages = (inner, inner * parallel.dp) if system.data_inside_pipeline else (inner * parallel.pp, inner)
    ranks, stride = {
        "tp": (parallel.tp, 1),
        "cp": (parallel.cp, parallel.tp),
        "pp": (parallel.pp, stages),
        "dp": (parallel.dp, data),
        "ep": (parallel.ep, data),
        "dp·cp": (parallel.dp * parallel.cp, data if parallel.cp == 1 else min(data, parallel.tp)),
    }[axis]
    return Group(ranks, stride, per_node)


def block_of(config: Config, layer: int, per_node: int, system: System) -> BlockShape:
    """The sizes of a block of a model.

    Args:
        config: resolved.
        layer: its number.
        per_node: ranks of a node.
        system: as in `axis_group`.
    """
    model, parallel = config.model, config.parallel
    llama = model.architecture == "llama"
    experts = None
    if model.has_experts(layer):
        inner, shared = model.expert_ffn_hidden_size, model.shared_expert_ffn_hidden_size
        experts = ExpertShape(model.num_experts, model.experts_per_token, inner, shared)
    groups = {axis: axis_group(config, axis, per_node, system) for axis in ("tp", "cp", "ep")}
    return BlockShape(
        samples=config.train.micro_batch_size,
        length=config.data.sequence_length,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        key_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        ffn=model.ffn_hidden_size,
        gated=llama,
        rms=llama,
        biased=not llama,
        rotary=model.position_embedding == "rope",
        qk_norm=model.qk_norm,
        hidden_dropout=model.hidden_dropout > 0,
        attention_dropout=model.attention_dropout > 0,
        window=model.window(layer),
        experts=experts,
        dtype=config.precision.dtype,
        itemsize=ITEMSIZES[config.precision.dtype],
        sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
        ring=parallel.cp_method == "ring",
        **groups,
    )

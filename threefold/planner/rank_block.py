"""A transformer block as one rank of a layout computes it: its sizes, products, process groups and attention."""

from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final

from threefold.config import Config
from threefold.planner.block import BlockShape
from threefold.planner.systems import Attention, Kernels


@dataclass(frozen=True)
class Group:
    """Ranks of a mesh axis, `stride` global ranks apart, on nodes of `per_node` ranks."""

    ranks: int
    stride: int
    per_node: int

    @property
    def in_node(self) -> int:
        """Number of the group's ranks on one node."""
        return max(1, min(self.ranks, self.per_node // self.stride))

    @property
    def nodes(self) -> int:
        return ceil(self.ranks / self.in_node)


@dataclass(frozen=True, kw_only=True)
class RankBlock(BlockShape):
    """Transformer block as one rank computes it for one micro-batch.

    `length` is the sequence over all context-parallel ranks. With `sequence_parallel`, activations between the
    tensor-parallel layers are sharded along the sequence; with `ring`, context parallelism passes keys and values
    around a ring instead of gathering them; with `documents`, attention stops at document boundaries. `expert_stride`
    are the global ranks between neighbours on the expert axis. If routing to experts is not `balanced`, a rank's
    experts are chosen up to twice the mean. Attention and kernels say which tensors are kept; by default those of this
    package's kernels on a CPU.
    """

    samples: int
    length: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    ring: bool = False
    per_node: int = 8
    expert_stride: int = 1
    dtype: str = "bf16"
    itemsize: int = 2
    documents: bool = False
    attention: Attention = "fused"
    balanced: bool = False
    kernels: Kernels = field(default_factory=Kernels)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on a rank."""
        return self.samples * self.length // self.cp

    @property
    def local_tokens(self) -> int:
        """Tokens that the rank holds between the tensor-parallel layers."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def local_heads(self) -> int:
        return max(1, self.heads // self.tp)

    @property
    def local_key_heads(self) -> int:
        """Key and value heads on the rank; at least one, which several ranks may share."""
        return max(1, self.key_heads // self.tp)

    @property
    def seen(self) -> float:
        """Positions that a token attends to, on average."""
        window = min(self.window or self.length, self.length)
        return window * (1 - window / (2 * self.length))

    @property
    def wide(self) -> int:
        """Bytes per element of tensors computed in at least fp32."""
        return max(4, self.itemsize)

    @property
    def outer(self) -> int:
        """Bytes of the activations that the rank holds between the tensor-parallel layers."""
        return self.local_tokens * self.hidden * self.itemsize

    @property
    def whole(self) -> int:
        """Bytes of these activations before sequence parallelism shards them."""
        return self.tokens * self.hidden * self.itemsize

    @property
    def gathered(self) -> int:
        """Bytes of the activations that sequence parallelism gathers before a product; 0 without it."""
        return self.whole if self.sequence_parallel else 0

    @property
    def queries(self) -> int:
        return self.tokens * self.head_dim * self.heads // self.tp * self.itemsize

    @property
    def key_tokens(self) -> int:
        """Tokens whose keys and values the rank computes; context parallelism gathers latents before that."""
        return self.tokens * (1 if self.latents is None or self.ring else self.cp)

    @property
    def keys(self) -> int:
        """Bytes of the rank's keys, before GQA expands them."""
        return self.key_tokens * self.head_dim * self.itemsize * self.local_key_heads

    @property
    def values(self) -> int:
        return self.key_tokens * self.value_dim * self.itemsize * self.local_key_heads

    @property
    def outputs(self) -> int:
        """Bytes of attention's output on the rank, before the projection of it."""
        return self.tokens * self.value_dim * self.heads // self.tp * self.itemsize

    @property
    def products_of_attention(self) -> list[tuple[int, int, int]]:
        """Rows, columns and depth of each product of attention with a weight on the rank."""
        latents, hidden, value = self.latents, self.hidden, self.local_heads * self.value_dim
        query, out = self.local_heads * self.head_dim, (self.tokens, hidden, value)
        if latents is None:
            keys = 2 * self.local_key_heads * self.head_dim
            return [(self.tokens, query * (2 if self.output_gate else 1) + keys, hidden), out]
        keys = self.local_heads * (self.head_dim - latents.rotary) + value
        narrow = [(self.local_tokens, latents.queries, hidden)] if latents.queries else []
        shared = (self.local_tokens, latents.shared, hidden), (self.key_tokens, keys, latents.keys)
        return [*narrow, (self.tokens, query, latents.queries or hidden), *shared, out]

    def product(self, name: str) -> tuple[int, int]:
        """Return the columns and the depth on the rank of one of `PRODUCTS`."""
        *projections, output = self.products_of_attention
        inner = self.ffn // self.tp
        sizes = {
            "qkv": (sum(columns for _, columns, _ in projections), self.hidden),
            "proj": output[1:],
            "up": (inner * (2 if self.gated else 1), self.hidden),
            "down": (self.hidden, inner),
        }
        return sizes[name]

    def group(self, axis: str) -> Group:
        """Return the ranks of the axis `tp`, `cp` or `ep`."""
        ranks, stride = {"tp": (self.tp, 1), "cp": (self.cp, self.tp), "ep": (self.ep, self.expert_stride)}[axis]
        return Group(ranks, stride, self.per_node)


def rank_block(config: Config, block: BlockShape, **changes: Any) -> RankBlock:
    """Return a block as one rank computes it, with some further attributes."""
    parallel = config.parallel
    return RankBlock(
        **vars(block),
        samples=config.train.micro_batch_size,
        length=config.data.sequence_length,
        tp=parallel.tp,
        cp=parallel.cp,
        ep=parallel.ep,
        sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
        ring=parallel.cp_method == "ring",
        dtype=config.precision.dtype,
        itemsize=config.precision.itemsize,
        documents=config.data.separate_documents,
        **changes,
    )


_LONGEST_PLAIN: Final = 512
"""Longest sequence for which bf16 attention on a CPU (see `kernels`), and attention with dropout, keeps its weights."""


def built_in_attention(config: Config, block: BlockShape, device: str) -> Attention:
    """Return this package's implementation of a block's attention on `cpu` or `cuda`."""
    length = config.data.sequence_length
    tiled = config.data.separate_documents or 0 < block.window < length or block.tiled
    short = not tiled and length <= _LONGEST_PLAIN
    if config.train.exact and length <= _LONGEST_PLAIN:
        return "exact"
    if block.attention_dropout:
        return "dropped" if short else "dropped again"
    return "plain" if device == "cpu" and config.precision.dtype == "bf16" and short else "fused"

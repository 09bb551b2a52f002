"""A block as one rank computes it: the description of `threefold.models.block`, cut by tp, cp, ep and the micro-batch.

`activations` reads its memory from it and `block_cost` its time.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from threefold.config import Config
from threefold.config.model import OWN
from threefold.errors import UserError
from threefold.models.block import BlockShape, describe_model
from threefold.planner.collective_cost import Group
from threefold.planner.systems import Attention, Kernels


@dataclass(frozen=True, kw_only=True)
class RankBlock(BlockShape):
    """Transformer block as one rank computes it for one micro-batch.

    Attributes:
        samples, length: micro-batch size, and sequence length over all context-parallel ranks.
        tp, cp, ep: ranks that share heads and features, positions, and experts.
        sequence_parallel: whether activations between the tensor-parallel layers are sharded along the sequence.
        ring: whether context parallelism passes keys and values around a ring instead of gathering them.
        per_node, expert_stride: ranks per node, and global ranks between neighbours on the expert axis.
        dtype, itemsize: dtype of the computation, and bytes per element.
        documents: whether attention stops at document boundaries.
        attention: implementation of the attention core, as its memory depends on it.
        balanced: whether routing to experts is balanced; otherwise a rank's experts are chosen up to twice the mean.
        kernels: what the kernels keep; by default those of this package on a CPU.
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
    def own_tokens(self) -> int:
        """Tokens that the rank holds between the tensor-parallel layers."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def own_heads(self) -> int:
        return max(1, self.heads // self.tp)

    @property
    def own_key_heads(self) -> int:
        """Key and value heads on the rank; at least one, which several ranks may share."""
        return max(1, self.key_heads // self.tp)

    @property
    def own_experts(self) -> int:
        """Experts on the rank with the most."""
        return 0 if self.experts is None else -(-self.experts.count // self.ep)

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
        return self.own_tokens * self.hidden * self.itemsize

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
        """Bytes of the rank's queries."""
        return self.tokens * self.head_dim * self.heads // self.tp * self.itemsize

    @property
    def keys(self) -> int:
        """Bytes of the rank's keys, before GQA expands them; also those of its values."""
        return self.tokens * self.head_dim * self.itemsize * self.own_key_heads

    def group(self, axis: str) -> Group:
        """Return the ranks of the axis `tp`, `cp` or `ep`."""
        ranks, stride = {"tp": (self.tp, 1), "cp": (self.cp, self.tp), "ep": (self.ep, self.expert_stride)}[axis]
        return Group(ranks, stride, self.per_node)


def described_blocks(config: Config) -> tuple[BlockShape, ...]:
    """Return the description of each block of a model.

    Raises:
        UserError: the planner has no formulas for the blocks, or the model comes from a file.
    """
    if config.model.architecture == OWN:
        raise UserError(
            f"model.architecture is {OWN}, whose operations have no formulas; plan with a family of the same sizes, or "
            "use threefold dry-run, which runs the model."
        )
    return describe_model(config.model, config.data.sequence_length).blocks


def rank_block(config: Config, block: BlockShape, **changes: Any) -> RankBlock:
    """Return a block as one rank computes it.

    Args:
        config: resolved config of the run.
        block: description of the block.
        changes: further attributes of the result.
    """
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


def own_attention(config: Config, block: BlockShape, device: str) -> Attention:
    """Return how this package computes a block's attention on `cpu` or `cuda`."""
    length = config.data.sequence_length
    tiled = config.data.separate_documents or 0 < block.window < length
    short = not tiled and length <= _LONGEST_PLAIN
    if block.attention_dropout:
        return "dropped" if short else "dropped again"
    return "plain" if device == "cpu" and config.precision.dtype == "bf16" and short else "fused"

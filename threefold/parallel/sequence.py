"""Positions of a sequence that a rank works on, and mesh axes that parallel layers are made for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from threefold.comm.axis import Axis
from threefold.errors import UserError


@dataclass(frozen=True)
class SequenceCut:
    """Positions of every sequence that one rank holds; implements `Positions` for the sequence dim.

    Context parallelism cuts the sequence into 2·cp chunks, and rank i takes the i-th and the i-th from the end, so that
    causal attention is the same work for all (Llama 3, arXiv 2407.21783, section 3.3.2). Sequence parallelism cuts each
    rank's part into tp consecutive shards.

    Attributes:
        cp, cp_index: size of the context axis, and this rank's index.
        tp, tp_index: size of the tensor axis and this rank's index if it shards the sequence, else 1 and 0.
    """

    cp: int = 1
    cp_index: int = 0
    tp: int = 1
    tp_index: int = 0

    @property
    def shares(self) -> int:
        """Number of ranks that a sequence is sharded over."""
        return self.cp * self.tp

    @property
    def chunks(self) -> tuple[int, int]:
        """Numbers of this context rank's two chunks, of the 2·cp chunks of the sequence."""
        return self.cp_index, 2 * self.cp - 1 - self.cp_index

    @property
    def across_context(self) -> "SequenceCut":
        """Cut with the same positions on every tensor rank, as inside attention."""
        return replace(self, tp=1, tp_index=0)

    def whole(self, size: int) -> int:
        """Return the length of a sequence of which a rank holds `size` positions."""
        return size * self.shares

    def indices(self, size: int, device: torch.device) -> Tensor:
        """Return the `size` positions held, int64, ascending within a chunk.

        Raises:
            ValueError: the sequence does not divide into 2·cp chunks.
        """
        held = torch.arange(self.tp_index * size, (self.tp_index + 1) * size, device=device)
        if self.cp == 1:
            return held
        if size * self.tp % 2:
            raise ValueError(f"{size * self.shares} positions do not divide into {2 * self.cp} chunks")
        chunk = size * self.tp // 2
        first, last = (number * chunk for number in self.chunks)
        return torch.where(held < chunk, held + first, held - chunk + last)


def chunk_length(positions: int) -> int:
    """Return the number of positions in each of a rank's two chunks; raise a `ValueError` if it is odd."""
    if positions % 2:
        raise ValueError(f"{positions} positions of a rank are not two chunks of one length")
    return positions // 2


@dataclass(frozen=True)
class ShardingContext:
    """Mesh axes that parallel layers are made for, and this rank's place on them.

    Attributes:
        ep: replicas that share the experts.
        sequence_parallel: whether activations between parallel layers are sharded along the sequence over tp.
        cp_method: how keys and values reach the queries of other context ranks, as in `parallel.cp_method`.
        tp_shares: number of neighbouring tensor ranks that share a unit → axis of these ranks.
    """

    tp: Axis
    cp: Axis
    ep: Axis
    sequence_parallel: bool = False
    cp_method: str = "all-gather"
    tp_shares: Mapping[int, Axis] = field(default_factory=dict)

    @property
    def cut(self) -> SequenceCut:
        """Part of the sequence that this rank's activations between parallel layers cover."""
        context = SequenceCut(self.cp.size, self.cp.index)
        return replace(context, tp=self.tp.size, tp_index=self.tp.index) if self.sequence_parallel else context

    @property
    def sequence_dim(self) -> int | None:
        """Dim of activations [B, S, H] that is sharded over tp between parallel layers; None if none is."""
        return 1 if self.sequence_parallel else None

    @property
    def divides(self) -> bool:
        """Whether any layer has to be replaced."""
        return self.tp.size > 1 or self.cp.size > 1 or self.ep.size > 1


def sum_over_shares_(gradients: Sequence[Tensor], axis: Axis) -> None:
    """All-reduce gradients of weights that each rank of `axis` holds whole but used on its own positions only.

    For training steps of your own; the training step of a run sums them itself (`train.step`).

    Args:
        gradients: gradients of one dtype, in the same order on every rank; replaced by their sums.
        axis: ranks that share the sequence.
    """
    axis.all_reduce_together_(gradients)


def check_whole_sequences(cp: int, sequence_parallel: bool) -> None:
    """Raise a `UserError` if a layout shards sequences, since a user's loss function needs whole ones."""
    if cp > 1 or sequence_parallel:
        setting = f"cp is {cp}" if cp > 1 else "sequence_parallel is true"
        raise UserError(
            f"{setting} but a loss function of the user's needs whole sequences; use "
            f"{'cp 1' if cp > 1 else 'sequence_parallel false'}."
        )

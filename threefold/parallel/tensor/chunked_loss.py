"""The head's product and the cross-entropy together, in chunks, over a vocabulary that is split over ranks.

A rank computes its own columns of the logits (`ops.cross_entropy`); a maximum and two sums per token are all-reduced,
once for all chunks.
"""

import torch
from torch import Tensor

from threefold.comm.axis import Axis
from threefold.comm.collectives import reduce_from
from threefold.labels import IGNORE_INDEX
from threefold.ops.cross_entropy import logit_sums
from threefold.ops.sizes import LOGITS_AT_ONCE


# Torch's compiler would find the logits of both passes to be the same, and keep them.
@torch.compiler.disable
def parallel_chunked_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, chunk: int, start: int, axis: Axis, at_once: int = LOGITS_AT_ONCE
) -> Tensor:
    """`F.cross_entropy(F.linear(x, weight), labels, reduction="none")`, of whose logits `chunk` columns exist at once.

    Args:
        x: [..., H], the same on every rank of `axis`; its gradient is this rank's part of a sum over them (`copy_to`
            or `gather_shares` before this completes it).
        weight: this rank's rows of the whole [V, H], which may be none.
        labels: int64 [...], in the whole vocabulary, or -100 to ignore a token.
        chunk: columns of the logits, at least 1.
        start: the first of this rank's rows.
        axis: the ranks that the vocabulary is split over.
        at_once: logits that it goes over at once on a CPU; changes no result.

    Returns:
        [...], zero for ignored labels, the same on every rank; in fp32, or fp64 for fp64 inputs.
    """
    flat = labels.flatten()
    column = flat - start
    top, total, target = logit_sums(x.flatten(0, -2), weight, column, chunk, at_once)
    highest = axis.all_reduce_max_(top.clone())
    mine = (column >= 0) & (column < len(weight))
    parts = [total * (top - highest).exp(), (target - highest).masked_fill(~mine, 0)]
    whole, shifted = reduce_from(torch.stack(parts), axis)
    losses = whole.log() - shifted
    return losses.masked_fill(flat == IGNORE_INDEX, 0).view(labels.shape)

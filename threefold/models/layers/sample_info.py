"""What layers are told of the samples beside their activations."""

from typing import NamedTuple

from torch import Tensor


class Samples(NamedTuple):
    """Facts of the samples of a micro-batch, the same on every rank that works on them.

    Attributes:
        keys: int64 [B], from which dropout masks follow; None to drop nothing.
        documents: int64 [B, S], the document of each token of the whole sequence, where attention stops at their
            bounds; None where it does not.
        weights: float [B, S], what the losses that layers add for each token of the whole sequence count for in the
            gradient; None where they count for nothing.
        positions: int64 [B, S], the position of each token of the whole sequence in its document, where learned
            positions count by document; None where they count from the start of the sample.
    """

    keys: Tensor | None = None
    documents: Tensor | None = None
    weights: Tensor | None = None
    positions: Tensor | None = None


NOTHING = Samples()
"""Nothing is known: nothing is dropped, and attention crosses the bounds of documents."""

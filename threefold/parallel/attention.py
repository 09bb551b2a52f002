"""Causal self-attention on one device; `context.py` has the version whose sequence is spread over ranks."""

import torch
from torch import Tensor, nn

from threefold.kernels import causal_attention, later
from threefold.parallel.random import Dropout
from threefold.parallel.samples import NOTHING, Samples


class CausalAttention(nn.Module):
    """softmax(Q·Kᵀ/√d)·V over the positions up to each token's own; of its own document only, where those are told.

    Args:
        dropout: probability of dropping an attention weight.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, samples: Samples = NOTHING) -> Tensor:
        """Attend from the last Q positions of the first K, Q being all K where a sequence is whole.

        Args:
            q: [B, Q, heads, d].
            k, v: [B, K, heads, d].
            samples: dropout keys and documents.

        Returns:
            [B, Q, heads · d].
        """
        queries, keys = q.shape[1], k.shape[1]
        apart = None if samples.documents is None else _apart(samples.documents[:, :keys], queries)
        if not self.dropout.draws(samples.keys):
            return causal_attention(q, k, v, apart)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # [B, heads, S, d]
        hidden = later(queries, keys, q.device)
        if apart is not None:
            hidden = (hidden | apart).unsqueeze(1)
        weights = (q * q.shape[-1] ** -0.5 @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1)
        return (self.dropout(weights, samples.keys) @ v).transpose(1, 2).flatten(2)


def _apart(documents: Tensor, queries: int) -> Tensor:
    """bool [B, queries, K]: whether each of the last positions lies in another document than each of the K."""
    return documents[:, -queries:, None] != documents[:, None]

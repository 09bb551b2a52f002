"""Causal self-attention on one device; `context.py` has the version whose sequence is spread over ranks."""

import torch
from torch import Tensor, nn

from threefold.kernels import causal_attention
from threefold.parallel.random import Dropout
from threefold.parallel.samples import NOTHING, Samples


class CausalAttention(nn.Module):
    """softmax(Q·Kᵀ/√d)·V over the positions up to each token's own.

    Args:
        dropout: probability of dropping an attention weight.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, samples: Samples = NOTHING) -> Tensor:
        """`q`, `k`, `v` [B, S, heads, d] → [B, S, heads · d]."""
        if not self.dropout.draws(samples.keys):
            return causal_attention(q, k, v)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # [B, heads, S, d]
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf).softmax(-1)
        return (self.dropout(weights, samples.keys) @ v).transpose(1, 2).flatten(2)

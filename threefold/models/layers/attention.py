"""Causal self-attention on one device; `context.py` has the version whose sequence is spread over ranks."""

import torch
from torch import Tensor, nn

from threefold.models.layers.sample_info import NOTHING, Samples
from threefold.ops.kernels import causal_attention, later, serve_heads
from threefold.random.philox import Dropout


class CausalAttention(nn.Module):
    """softmax(Q·Kᵀ/√d)·V over the positions up to each token's own; of its own document only, where those are told.

    Args:
        dropout: probability of dropping an attention weight.
        window: how many positions back, its own among them, a token attends to; 0 for all.
    """

    def __init__(self, dropout: float = 0.0, window: int = 0) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, samples: Samples = NOTHING) -> Tensor:
        """Attend from the last Q positions of the first K, Q being all K where a sequence is whole.

        Args:
            q: [B, Q, heads, d].
            k, v: [B, K, key-value heads, d]; each of their heads serves as many neighbouring ones of `q`.
            samples: dropout keys and documents.

        Returns:
            [B, Q, heads · d].
        """
        apart = self._apart(q.shape[1], k.shape[1], samples, q.device)
        if not self.dropout.draws(samples.keys):
            return causal_attention(q, k, v, apart)
        k, v = (serve_heads(each, q.shape[2]) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # [B, heads, S, d]
        hidden = later(q.shape[2], k.shape[2], q.device)
        if apart is not None:
            hidden = (hidden | apart).unsqueeze(1)
        weights = (q * q.shape[-1] ** -0.5 @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1)
        return (self.dropout(weights, samples.keys) @ v).transpose(1, 2).flatten(2)

    def _apart(self, queries: int, keys: int, samples: Samples, device: torch.device) -> Tensor | None:
        """bool [B or 1, queries, keys]: what is hidden though it comes before; None where nothing is."""
        apart = None if samples.documents is None else _apart(samples.documents[:, :keys], queries)
        if not 0 < self.window < keys:
            return apart
        behind = out_of_window(queries, keys, self.window, device)
        return behind.unsqueeze(0) if apart is None else apart | behind


def _apart(documents: Tensor, queries: int) -> Tensor:
    """bool [B, queries, K]: whether each of the last positions lies in another document than each of the K."""
    return documents[:, -queries:, None] != documents[:, None]


def out_of_window(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """bool [queries, keys]: which keys lie `window` positions or more before each of the last `queries` positions."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries - window)

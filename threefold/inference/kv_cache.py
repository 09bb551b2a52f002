"""KV cache: the keys and values of earlier tokens are kept, so decoding a token costs the work of one token.

The model is unchanged: within a `caching` block, a cached module replaces each `CausalAttention`, and the positions
(learned or rotary) come from a `Cursor`.

Samples of a batch may differ in length. They are padded on the right, where causal attention ignores the padding: it
comes after every token of its sample, and its cache slots are overwritten before a later position attends to them. With
a sliding window the cache is a ring buffer with as many slots as the window.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.models.layers.attention import CausalAttention, Rotary
from threefold.models.layers.decoder import NOTHING, PositionEmbedding, SampleInfo


class Cursor:
    """Positions of the current tokens in their samples; implements `Positions` of the sequence dim.

    Attributes:
        positions: int64 [B, S] (or [1, S], shared by all samples).
        rows: int64 [B], cache rows to prefill; None when every row gets one more token.
        lasts: int64 [B], last position of each sample that is not padding.
        used: number of slots that any row has used.
    """

    positions: Tensor
    rows: Tensor | None
    lasts: Tensor
    used: int

    def fill(self, rows: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        """Prefill: the next forward pass holds the first tokens of these rows, padded on the right."""
        self.positions = torch.arange(max(lengths), device=device).unsqueeze(0)
        self.rows = torch.tensor(rows, device=device)
        self.lasts = torch.tensor(lengths, device=device) - 1
        self.used = max(lengths)

    def advance(self, positions: Sequence[int], device: torch.device) -> None:
        """Decode: the next forward pass holds one token per row, at these positions."""
        self.rows = None
        self.lasts = torch.tensor(positions, device=device)
        self.positions = self.lasts.unsqueeze(1)
        self.used = max(positions) + 1

    def held(self, slots: int) -> Tensor:
        """Return the position whose key is in each slot, int64 [B, slots]; negative for unused slots.

        Position p is in slot p modulo `slots`, so later positions overwrite earlier ones.
        """
        lasts = self.lasts.unsqueeze(1)
        return lasts - (lasts - torch.arange(slots, device=lasts.device)) % slots

    def indices(self, size: int, device: torch.device) -> Tensor:
        return self.positions

    def whole(self, size: int) -> int:
        return size


class CachedAttention(nn.Module):
    """`CausalAttention` with a KV cache: new tokens attend to all earlier tokens of their samples.

    Args:
        core: attention over whole sequences, without dropout.
        cursor: positions of the tokens.
        rows: samples of a batch.
        slots: cached positions per sample; capped at the sliding window.

    Attributes:
        keys, values: [rows, kv heads, slots, d]; None before the first tokens.
    """

    def __init__(self, core: CausalAttention, cursor: Cursor, rows: int, slots: int) -> None:
        super().__init__()
        self.core, self.cursor, self.rows = core, cursor, rows
        self.slots = min(slots, core.window or slots)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """Cache `k`, `v` [B, S, kv heads, d] and attend from `q` [B, S, heads, d] → [B, S, heads · d]."""
        if self.keys is None or self.values is None:
            shape = (self.rows, k.shape[2], self.slots, k.shape[3])
            self.keys, self.values = k.new_zeros(shape), v.new_zeros(shape)
        held = self.cursor.held(self.slots)
        if self.cursor.rows is not None:
            for kept, new in ((self.keys, k), (self.values, v)):
                kept[self.cursor.rows] = _take(new, held.clamp(min=0)).transpose(1, 2)
            return self.core(q, k, v, samples)
        every = torch.arange(len(k), device=k.device)
        slot = self.cursor.lasts % self.slots
        self.keys[every, :, slot], self.values[every, :, slot] = k[:, 0], v[:, 0]
        used = min(self.cursor.used, self.slots)
        return _attend(q, self.keys[:, :, :used], self.values[:, :, :used], held[:, :used] >= 0)

    def keep(self, rows: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]


class Cache:
    """KV cache of all layers of a stage, and the cursor that they share."""

    def __init__(self, cursor: Cursor, attentions: list[CachedAttention]) -> None:
        self.cursor, self._attentions = cursor, attentions

    def keep(self, rows: Sequence[int], device: torch.device) -> None:
        """Keep only these rows, in this order."""
        for attention in self._attentions:
            attention.keep(torch.tensor(rows, device=device))

    @property
    def nbytes(self) -> int:
        held = [each for attention in self._attentions for each in (attention.keys, attention.values)]
        return sum(each.nbytes for each in held if each is not None)


@contextmanager
def caching(model: nn.Module, rows: int, slots: int) -> Iterator[Cache]:
    """Give the attention layers of `model` a KV cache within the block.

    Args:
        model: model or stage, in evaluation mode and not split along the sequence.
        rows: samples of a batch.
        slots: maximum length of a sample, in tokens.
    """
    cursor = Cursor()
    cached: list[CachedAttention] = []
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, CausalAttention):
                cached.append(CachedAttention(child, cursor, rows, slots))
                setattr(parent, name, cached[-1])
            elif isinstance(child, Rotary | PositionEmbedding):
                setattr(parent, name, child.of_positions(cursor))
            else:
                continue
            replaced.append((parent, name, child))
    try:
        yield Cache(cursor, cached)
    finally:
        for parent, name, child in replaced:
            setattr(parent, name, child)


def _take(x: Tensor, positions: Tensor) -> Tensor:
    """Gather `x` [B, S, heads, d] at `positions` [B, slots] → [B, slots, heads, d]."""
    return x[torch.arange(len(x), device=x.device).unsqueeze(1), positions]


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Attend (GQA) from one query per row [B, 1, heads, d] to the `visible` slots of [B, kv heads, slots, d]."""
    grouped = q.shape[2] != k.shape[1]
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=visible[:, None, None], enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2)

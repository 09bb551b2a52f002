"""Reference attention by its definition with full attention masks, and documents of any kind."""

import torch
from torch import Tensor

from threefold.ops.kernels import PLAIN_SCORING, Scoring


def hidden(queries: int, keys: int, window: int, documents: Tensor | None) -> Tensor:
    """Return bool [B or 1, queries, keys]: True where one of the last queries does not attend to a key."""
    query, key = torch.arange(keys - queries, keys).unsqueeze(1), torch.arange(keys)
    found = (key > query).unsqueeze(0)
    if window:
        found = found | (key <= query - window)
    if documents is not None:
        found = found | (documents[:, keys - queries : keys, None] != documents[:, None, :keys])
    return found


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int = 0,
    documents: Tensor | None = None,
    scoring: Scoring = PLAIN_SCORING,
) -> Tensor:
    """Compute `threefold.ops.attention.attention` in fp64."""
    weights = masked_weights(q, k, window, documents, scoring)
    return (weights @ _served(v, q)).transpose(1, 2).flatten(2)


def masked_weights(
    q: Tensor, k: Tensor, window: int, documents: Tensor | None, scoring: Scoring = PLAIN_SCORING
) -> Tensor:
    """Compute attention weights [B, heads, Q, K] in fp64."""
    apart = hidden(q.shape[1], k.shape[1], window, documents).unsqueeze(1)
    found = q.transpose(1, 2).double() @ _served(k, q).mT
    found = found / q.shape[-1] ** 0.5 if scoring.scale is None else found * scoring.scale
    if scoring.softcap:
        found = torch.tanh(found / scoring.softcap) * scoring.softcap
    found = found.masked_fill(apart, -torch.inf)
    if scoring.sinks is None:
        return found.softmax(-1)
    # The sum of the exponentials, with the sink's among them.
    whole = torch.logsumexp(
        torch.cat([found, scoring.sinks.double().view(-1, 1, 1).expand(*found.shape[:-1], 1)], -1), -1
    )
    return (found - whole.unsqueeze(-1)).exp()


def _served(x: Tensor, q: Tensor) -> Tensor:
    return x.transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], 1).double()


def numbered(kind: str, rows: int, length: int, seed: int = 0) -> Tensor | None:
    """Return the document number of each position, int64 [rows, length].

    Args:
        kind: `none`, `one`, `single tokens`, `few`, `many`, or `apart` (documents in several separate parts).
        seed: seed of the random bounds, which differ from row to row.
    """
    if kind == "none":
        return None
    if kind in ("one", "single tokens"):
        return (torch.arange(length) * (kind != "one")).expand(rows, -1).clone()
    draw = torch.Generator().manual_seed(seed)
    if kind == "apart":
        return torch.randint(0, 3, (rows, -(-length // 5)), generator=draw).repeat_interleave(5, 1)[:, :length].clone()
    share = {"few": 0.01, "many": 0.2}[kind]
    return (torch.rand(rows, length, generator=draw) < share).long().cumsum(1)

"""One tile of attention by plain products, and its gradients, for which the weights are computed once more."""

from collections.abc import Callable

import torch
from torch import Tensor

from threefold.ops.kernels import serve_heads
from threefold.ops.tile_inputs import wide

Drop = Callable[[Tensor], Tensor]
"""Dropout of attention weights [B, heads, Q, K], or of their gradient: the same elements every time."""


def plain_tile(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, drop: Drop | None = None) -> Tensor:
    """softmax(Q·Kᵀ/√d + bias)·V, [B, heads, Q, d].

    Args:
        q: [B, heads, Q, d].
        k, v: [B, key-value heads, K, d]; each key-value head serves a group of neighbouring heads of `q` (GQA).
        bias: [Q, K]; None for none.
        drop: of the weights.
    """
    k, v = (serve_heads(each, q.shape[1], 1) for each in (k, v))
    weights = _weights(q, k, bias)
    return (weights if drop is None else drop(weights)) @ v


def plain_tile_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, bias: Tensor | None, drop: Drop | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `q`, `k` and `v` of `plain_tile`, whose result is `out`."""
    key_heads = k.shape[1]
    k, v = (serve_heads(each, q.shape[1], 1) for each in (k, v))
    weights = _weights(q, k, bias)
    to_v = (weights if drop is None else drop(weights)).mT @ grad
    of_weights = grad @ v.mT
    if drop is not None:
        of_weights = drop(of_weights)
    common = (grad * out).sum(-1, keepdim=True, dtype=wide(q)).to(q.dtype)  # from the softmax's denominator
    of_scores = of_weights.sub_(common).mul_(weights)
    scale = q.shape[-1] ** -0.5
    to_q, to_k = (of_scores @ k).mul_(scale), (of_scores.mT @ q).mul_(scale)
    return to_q, _of_groups(to_k, key_heads), _of_groups(to_v, key_heads)


def _weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    batch, heads, queries, width = q.shape
    added, beta = (q.new_zeros(()), 0) if bias is None else (bias, 1)
    q, k = (each.reshape(batch * heads, -1, width) for each in (q, k))
    scores = torch.baddbmm(added, q, k.mT, beta=beta, alpha=width**-0.5)
    return scores.softmax(-1).view(batch, heads, queries, -1)


def _of_groups(gradient: Tensor, key_heads: int) -> Tensor:
    """The gradient of keys or values as all heads have it, added up for the key-value heads."""
    return gradient if gradient.shape[1] == key_heads else gradient.unflatten(1, (key_heads, -1)).sum(2)

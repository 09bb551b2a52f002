"""One tile of attention by plain products, and its gradients, for which the weights are computed once more."""

from collections.abc import Callable

import torch
from torch import Tensor

from threefold.ops.kernels import serve_heads
from threefold.torch_private.attention import softmax_gradient

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
    return _product(weights if drop is None else drop(weights), v)


def plain_tile_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, drop: Drop | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `q`, `k` and `v` of `plain_tile`, to whose result `grad` is the gradient."""
    key_heads = k.shape[1]
    grad, q = grad.contiguous(), q.contiguous()  # two products each
    k, v = (serve_heads(each, q.shape[1], 1) for each in (k, v))
    weights = _weights(q, k, bias)
    to_v = _product((weights if drop is None else drop(weights)).mT, grad)
    of_weights = _product(grad, v.mT)
    if drop is not None:
        of_weights = drop(of_weights)
    of_scores = softmax_gradient(of_weights, weights)
    scale = q.shape[-1] ** -0.5
    to_q, to_k = _product(of_scores, k, scale), _product(of_scores.mT, q, scale)
    return to_q, _of_groups(to_k, key_heads), _of_groups(to_v, key_heads)


def _weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    return _product(q, k.mT, q.shape[-1] ** -0.5, bias).softmax(-1)


def _product(a: Tensor, b: Tensor, scale: float = 1.0, bias: Tensor | None = None) -> Tensor:
    """`scale` · a·b + `bias` of matrices [B, heads, …], each product rounded once."""
    added, beta = (a.new_zeros(()), 0) if bias is None else (bias, 1)
    return torch.baddbmm(added, a.flatten(0, 1), b.flatten(0, 1), beta=beta, alpha=scale).unflatten(0, a.shape[:2])


def _of_groups(gradient: Tensor, key_heads: int) -> Tensor:
    """The gradient of keys or values as all heads have it, added up for the key-value heads."""
    return gradient if gradient.shape[1] == key_heads else gradient.unflatten(1, (key_heads, -1)).sum(2)

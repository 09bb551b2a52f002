"""Private parts of torch that concern attention."""

from typing import Any

import torch
from torch import Tensor


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Torch's fused attention of a CPU, with the logarithm of the sum of each query's exponentiated scores.

    Args:
        q: [B, heads, Q, d].
        k, v: [B, key-value heads, K, d]; each key-value head serves a group of neighbouring heads of `q`.
        bias: [Q, K], added to the scores, in the dtype of `q` or fp32.
        causal: whether a query attends to its own place and those before it alone; then K is Q.

    Returns:
        [B, heads, Q, d], and [B, heads, Q] in fp32 at least.

    Why: `F.scaled_dot_product_attention` keeps that logarithm for its own backward pass alone, so that its results of
    parts of a sequence could not be written into one tensor that is kept once. An argument that asks for it, as
    `return_aux` of `torch.nn.attention.varlen`, would replace it.
    """
    mask = None if bias is None else bias[None, None]
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask
    )
    return found


def cpu_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, bias: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `q`, `k` and `v` of `cpu_attention`, whose results are `out` and `sums`.

    Why, and what would replace it: as `cpu_attention`.
    """
    mask: Any = None if bias is None else bias[None, None]
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, sums, 0.0, causal, attn_mask=mask
    )
    return found


def softmax_gradient(grad: Tensor, weights: Tensor) -> Tensor:
    """The gradient of what `softmax(-1)` made `weights` of, `grad` being theirs: weights · (grad − Σ weights · grad).

    Why: it is one pass over both, where public operations take two and a sum that has to be known before; autograd
    calls it, but not for weights that are computed again. A public name would replace it.
    """
    found: Tensor = torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)
    return found

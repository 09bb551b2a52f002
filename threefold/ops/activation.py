"""Activation functions of feed-forward networks, by name."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from threefold.ops.gelu import gelu_tanh


def squared_relu(x: Tensor) -> Tensor:
    """max(0, x)² (So et al., Primer, arXiv 2109.08668)."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """x · σ(1.702 · x), the sigmoid approximation of GELU (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu_tanh": gelu_tanh,
    "gelu": F.gelu,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": squared_relu,
    "silu": F.silu,
}
"""Name in `model.activation` → function of each element."""

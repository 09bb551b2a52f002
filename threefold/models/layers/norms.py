"""RMSNorm with other factors, or over all heads together (QK-norm over the whole width)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm whose factors are 1 + its weight, as in Gemma; computed in fp32 at least."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., n] → [..., n]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.normalized_shape, 1 + self.weight.to(wide), self.eps).to(x.dtype)


def rms_norm(width: int, eps: float, offset: bool) -> nn.RMSNorm:
    """Return an RMSNorm (Zhang and Sennrich, arXiv 1910.07467) whose factors are its weight, or 1 + its weight."""
    return OffsetRMSNorm(width, eps) if offset else nn.RMSNorm(width, eps)


class WidthNorm(nn.Module):
    """RMSNorm over all features of `heads` heads together, as in OLMo 2; `weight` is that of the heads in order."""

    def __init__(self, heads: int, head_dim: int, eps: float, offset: bool) -> None:
        super().__init__()
        self.heads, self.head_dim, self.eps, self.offset = heads, head_dim, eps, offset
        self.weight = nn.Parameter(torch.empty(heads * head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, heads, d] → [B, S, heads, d], in fp32 at least."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = self.total(wide.square().sum((-2, -1), keepdim=True), x.shape[2]) / (self.heads * self.head_dim)
        factors = self.of_heads(self.weight.to(wide.dtype).view(self.heads, -1), x.shape[2])
        return (wide * (mean + self.eps).rsqrt() * (1 + factors if self.offset else factors)).to(x.dtype)

    # `parallel` overrides these for a rank that has some of the heads.

    def total(self, squares: Tensor, heads: int) -> Tensor:
        """Return the sum of the squares of all heads from that of the `heads` at hand."""
        return squares

    def of_heads(self, factors: Tensor, heads: int) -> Tensor:
        """Return the rows of `factors` [all heads, d] of the `heads` at hand."""
        return factors

    def extra_repr(self) -> str:
        return f"heads={self.heads}, head_dim={self.head_dim}, eps={self.eps:g}"

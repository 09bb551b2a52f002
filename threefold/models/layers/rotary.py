"""Rotary position embedding, and the ways to stretch it to longer sequences."""

from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Literal

import torch
from torch import Tensor, nn

from threefold.random.philox import Part, Slice


@dataclass(frozen=True)
class RopeScaling:
    """How the angles are changed for sequences longer than `original_positions`.

    Attributes:
        method: `linear` (Chen et al., arXiv 2306.15595), `dynamic` ("NTK-aware", for each sequence's own length),
            `llama3` (Llama 3.1), `yarn` (Peng et al., arXiv 2309.00071).
        factor: by how much.
        original_positions: what the model was first trained on.
        low_frequency_factor, high_frequency_factor: for `llama3`, turns in `original_positions`.
        beta_fast, beta_slow: for `yarn`, turns in `original_positions`.
        attention_factor: what queries and keys are multiplied by.
    """

    method: Literal["none", "linear", "dynamic", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_positions: int = 1
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


class Rotary(nn.Module):
    """Rotary position embedding (Su et al., RoFormer, arXiv 2104.09864): turns queries and keys by their position.

    Element i of a head's first half and element i of its second half are one pair, as in Hugging Face's Llama.

    Args:
        head_dim: d, even.
        theta: base of the angles; pair i of d/2 turns by position · theta^(−2i/d).
        scaling: how they are changed for long sequences.

    Attributes:
        part: the positions that this rank's queries and keys cover (set when a model is split).
    """

    part: Part = Slice()

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling or RopeScaling()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """`q`, `k` [B, S, heads, d], each turned; worked out in fp32 at least."""
        # Exact angles of far positions need fp64; a table of them would be a buffer that every rank has to fill.
        size = q.shape[1]
        turns = frequencies(self.head_dim, self.theta, self.scaling, self.part.whole(size)).to(q.device)
        angles = self.part.indices(size, q.device).double().unsqueeze(-1) * turns
        wide = torch.promote_types(q.dtype, torch.float32)
        factor = self.scaling.attention_factor
        cos, sin = ((each * factor).to(wide).unsqueeze(-2) for each in (angles.cos(), angles.sin()))  # [S, 1, d/2]
        return _turn(q, cos, sin), _turn(k, cos, sin)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, theta={self.theta:g}, scaling={self.scaling.method}"


def frequencies(head_dim: int, theta: float, scaling: RopeScaling, length: int) -> Tensor:
    """Radians per position of each pair: fp64 [d/2].

    Args:
        head_dim, theta, scaling: as for `Rotary`.
        length: of the whole sequence, for `dynamic`.
    """
    if scaling.method == "dynamic" and length > scaling.original_positions:
        stretch = scaling.factor * length / scaling.original_positions - (scaling.factor - 1)
        theta *= stretch ** (head_dim / (head_dim - 2))
    plain = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / -head_dim)
    if scaling.method == "linear":
        return plain / scaling.factor
    if scaling.method == "llama3":
        return _mixed(plain, scaling.factor, _llama3_share(plain, scaling))
    if scaling.method == "yarn":
        return _mixed(plain, scaling.factor, _yarn_share(head_dim, theta, scaling))
    return plain


def _mixed(plain: Tensor, factor: float, stays: Tensor) -> Tensor:
    """Frequencies of which a share in [0, 1] stays, and the rest is divided."""
    return plain * stays + plain / factor * (1 - stays)


def _llama3_share(plain: Tensor, scaling: RopeScaling) -> Tensor:
    turns = scaling.original_positions * plain / (2 * pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    return ((turns - low) / (high - low)).clamp(0, 1)


def _yarn_share(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    def pair(turns: float) -> float:
        """Which pair, counted in dims of d/2, turns so many times in the original positions."""
        return head_dim * log(scaling.original_positions / (turns * 2 * pi)) / (2 * log(theta))

    first = max(floor(pair(scaling.beta_fast)), 0)
    last = min(ceil(pair(scaling.beta_slow)), head_dim - 1)
    width = last - first if last != first else 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64) - first) / width
    return 1 - ramp.clamp(0, 1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

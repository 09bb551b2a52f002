"""Angles of rotary position embeddings, including those for sequences longer than in the original training."""

from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Final, Literal

import torch
from torch import Tensor

from threefold.config.model import FOR_SCALED_ROPE, ModelConfig
from threefold.torch_private.runtime import operator

BY_LENGTH: Final = ("dynamic", "longrope")
"""Methods whose angles depend on the length of the sequence."""


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary angles for sequences longer than `original_positions`.

    Methods are `linear` (Chen et al., arXiv 2306.15595), `dynamic` ("NTK-aware", by each sequence's own length),
    `llama3` (Llama 3.1), `yarn` (Peng et al., arXiv 2309.00071) and `longrope` (Ding et al., arXiv 2402.13753: other
    factors for sequences longer than the original positions). Frequencies and betas are bounds in turns over the
    original positions; `attention_factor` multiplies queries and keys.
    """

    method: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = "none"
    factor: float = 1.0
    original_positions: int = 1
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


def rope_scaling(config: ModelConfig) -> RopeScaling:
    """Return the scaling that a config sets."""
    return RopeScaling(config.rope_scaling, *(getattr(config, name) for name in FOR_SCALED_ROPE))


def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling, length: int, device: torch.device | None = None
) -> Tensor:
    """Return the radians per position of each pair of `Rotary`: fp64 [d/2].

    `length` is that of the whole sequence, for `dynamic` and `longrope`. The result is computed on `device`, as the
    host would wait for a copy to a GPU.
    """
    if scaling.method == "dynamic" and length > scaling.original_positions:
        stretch = scaling.factor * length / scaling.original_positions - (scaling.factor - 1)
        theta *= stretch ** (head_dim / (head_dim - 2))
    plain = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / -head_dim)
    if scaling.method == "linear":
        return plain / scaling.factor
    if scaling.method == "longrope":
        factors = scaling.long_factors if length > scaling.original_positions else scaling.short_factors
        on_gpu = device is not None and device.type == "cuda"
        divisors = torch.tensor(factors, dtype=torch.float64, pin_memory=on_gpu)
        return plain / divisors.to(device, non_blocking=True)
    if scaling.method == "llama3":
        turns = scaling.original_positions * plain / (2 * pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        stays = ((turns - low) / (high - low)).clamp(0, 1)
    elif scaling.method == "yarn":
        stays = _yarn_share(head_dim, theta, scaling, device)
    else:
        return plain
    # The mean of the frequencies unchanged (weight `stays`) and divided by the factor.
    return plain * stays + plain / scaling.factor * (1 - stays)


def _yarn_share(head_dim: int, theta: float, scaling: RopeScaling, device: torch.device | None) -> Tensor:
    def pair(turns: float) -> float:
        """Return the index (real, of d/2) of the pair that makes `turns` turns over the original positions."""
        return head_dim * log(scaling.original_positions / (turns * 2 * pi)) / (2 * log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64, device=device) - first) / width
    return 1 - ramp.clamp(0, 1)


def cos_and_sin(positions: Tensor, turns: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of `positions` int64 [S], times `factor`: [S, 1, d/2] each, in `dtype`."""
    # Compiled code would compute both in fp64 again for each head of each sample.
    compute = _opaque if torch.compiler.is_compiling() else _cos_and_sin
    return compute(positions, turns, factor, dtype)


def _cos_and_sin(positions: Tensor, turns: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = positions.double().unsqueeze(-1) * turns
    cos, sin = ((each * factor).to(dtype).unsqueeze(-2) for each in (angles.cos(), angles.sin()))
    return cos, sin


def _uncomputed(positions: Tensor, turns: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = (turns.new_empty(len(positions), 1, len(turns), dtype=dtype) for _ in range(2))
    return cos, sin


_opaque = operator("cos_and_sin", _uncomputed)(_cos_and_sin)

"""Mixture of experts (MoE): feed-forward networks of which each token uses a few, as in Mixtral (arXiv 2401.04088)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.models.layers.decoder import NOTHING, Linear, SampleInfo
from threefold.models.layers.mixture_config import MixtureConfig
from threefold.models.layers.router import Choice, Routing
from threefold.models.layers.swiglu import SwiGLU
from threefold.ops.kernels import grouped_linear


class MixtureOfExperts(nn.Module):
    """The weighted outputs of the few experts that the router chooses for a token, and of the shared one, if any."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.router = Linear(config.hidden_size, config.num_experts, bias=False)
        self.routing = Routing(
            config.num_experts,
            config.experts_per_token,
            config.expert_capacity_factor,
            config.normalize_expert_weights,
            config.router_aux_loss,
            config.router_z_loss,
        )
        self.experts = Experts(config.num_experts, config.hidden_size, config.expert_ffn_hidden_size)
        shared = config.shared_expert_ffn_hidden_size
        self.shared = SwiGLU(config.hidden_size, shared) if shared else None
        self.shared_gate = Linear(config.hidden_size, 1, bias=False) if config.shared_expert_gate else None

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """[B, S, H] → [B, S, H]."""
        out = self.experts(x, self.routing(self.router(x), samples))
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)


class Experts(nn.Module):
    """SwiGLU networks without biases.

    The rows of each expert's `gate_up` alternate, a gate's before that of what it gates.

    Args:
        experts: E.
        hidden: H.
        inner: F, the inner features of each.
    """

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, inner))

    # How many tokens each expert gets is known when a layer runs, not when it is compiled.
    @torch.compiler.disable
    def forward(self, x: Tensor, choice: Choice) -> Tensor:
        """[B, S, H] → [B, S, H]: the weighted sum of the outputs of each token's experts."""
        return through(x, choice, len(self.gate_up), lambda rows, counts: swiglu(rows, self.gate_up, self.down, counts))


def through(x: Tensor, choice: Choice, experts: int, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Sort tokens by expert, run the experts, and sum each token's outputs by their weights.

    Args:
        x: [B, S, H].
        choice: of each token.
        experts: how many there are.
        run: (rows [n, H] sorted by expert, int64 [experts] rows of each) → outputs [n, H].

    Returns:
        [B, S, H]; zero for a token whose experts were all full.
    """
    hidden, per_token = x.shape[-1], choice.experts.shape[-1]
    chosen = choice.experts.flatten()
    # Not `torch.bincount`, for whose size the host waits for a GPU.
    ones = chosen.new_ones(1).expand_as(chosen)
    counts = chosen.new_zeros(experts + 1).index_add_(0, chosen, ones)[:experts]
    order = chosen.argsort(stable=True)
    if choice.may_drop:
        order = order[: int(counts.sum())]  # without those whose expert was full, which come last
    # One row for each token and expert: both permutations are then copies, whose gradients are deterministic.
    rows = x.reshape(-1, 1, hidden).expand(-1, per_token, -1).reshape(-1, hidden)[order]
    outputs = run(rows, counts)
    slots = outputs.new_zeros(chosen.numel(), hidden).index_copy(0, order, outputs)
    weighted = slots.view(*choice.experts.shape, hidden) * choice.weights.unsqueeze(-1)
    return weighted.sum(-2)


def swiglu(rows: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor) -> Tensor:
    """Each expert's outputs for its rows.

    Args:
        rows: [n, H], sorted by expert.
        gate_up, down: [experts, 2F, H], [experts, H, F].
        counts: int64 [experts], rows of each.
    """
    gate, up = grouped_linear(rows, gate_up, counts).unflatten(-1, (-1, 2)).unbind(-1)
    return grouped_linear(F.silu(gate) * up, down, counts)

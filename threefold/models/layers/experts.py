"""The gated feed-forward network of Llama and of experts."""

from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.models.layers.decoder import NOTHING, Linear, SampleInfo
from threefold.models.layers.mixture_config import MixtureConfig
from threefold.ops.kernels import grouped_linear


class SwiGLU(nn.Module):
    """A feed-forward network whose inner features are gated (Shazeer, arXiv 2002.05202).

    The rows of `gate_up` alternate, a gate's before that of what it gates, so a contiguous cut is one between features.

    Args:
        hidden: H.
        inner: F, the inner features.
    """

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, 2 * inner, bias=False)
        self.down = Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """[..., H] → [..., H]; the samples are not used."""
        gate, up = self.gate_up(x).unflatten(-1, (-1, 2)).unbind(-1)
        return self.down(F.silu(gate) * up)


class Choice(NamedTuple):
    """The experts of each token.

    Attributes:
        experts: int64 [B, S, k]; the number of experts itself where a token's expert was full.
        weights: [B, S, k], of each expert's output.
        may_drop: whether an expert can have been full.
    """

    experts: Tensor
    weights: Tensor
    may_drop: bool = False


class Routing(nn.Module):
    """The k experts of the highest probability for each token (Shazeer et al., arXiv 1701.06538).

    Args:
        experts: E, how many there are.
        per_token: k.
        capacity_factor: most tokens of a sequence that an expert takes while training, as a multiple of S·k/E; 0 for
            no limit.
        normalize: whether a token's weights add up to 1.
        aux_loss: weight of the load balancing loss of each token (Fedus et al., Switch Transformers, arXiv 2101.03961,
            section 2.2).
        z_loss: weight of the squared log-sum-exp of each token's logits (Zoph et al., ST-MoE, arXiv 2202.08906).
    """

    def __init__(
        self, experts: int, per_token: int, capacity_factor: float, normalize: bool, aux_loss: float, z_loss: float
    ) -> None:
        super().__init__()
        self.experts, self.per_token, self.capacity_factor = experts, per_token, capacity_factor
        self.normalize, self.aux_loss, self.z_loss = normalize, aux_loss, z_loss

    @property
    def adds_losses(self) -> bool:
        return self.aux_loss > 0 or self.z_loss > 0

    def forward(self, logits: Tensor, samples: SampleInfo = NOTHING) -> Choice:
        """Choose by `logits` [B, S, E]; computed in fp32 at least.

        Args:
            samples: its `weights` are those of each token's auxiliary losses in the gradient.
        """
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        probabilities = wide.softmax(-1)
        weights, experts = probabilities.topk(self.per_token)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if samples.weights is not None and self.adds_losses:
            weights = _WithLoss.apply(weights, self._losses(wide, probabilities, experts, samples.weights))
        may_drop = bool(self.capacity_factor) and self.training
        if may_drop:
            experts = experts.masked_fill(~self._taken(experts), self.experts)
        return Choice(experts, weights.to(logits.dtype), may_drop)

    def _losses(self, logits: Tensor, probabilities: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The sum of both losses over the tokens at hand, each times its weight.

        Args:
            logits, probabilities: [B, S, E] of the positions at hand.
            experts: [B, S, k], of the same.
            weights: [B, S] of the whole sequence.
        """
        weights = weights.to(probabilities.dtype)
        own = self._own(weights)
        chosen = F.one_hot(experts, self.experts).sum(2).to(weights.dtype) * (own > 0).unsqueeze(-1)
        counts = self._sum_over_shares(chosen.sum(1))  # [B, E]
        counted = (weights > 0).sum(1, keepdim=True).clamp_min(1)
        shares = counts / (counted * self.per_token)
        balance = self.experts * (shares.unsqueeze(1) * probabilities).sum(-1)
        stray = logits.logsumexp(-1).square()
        return (own * (self.aux_loss * balance + self.z_loss * stray)).sum()

    def _taken(self, experts: Tensor) -> Tensor:
        """bool [B, S, k]: which of the tokens their experts have room for."""
        whole = self._whole(experts)
        capacity = ceil(self.capacity_factor * whole.shape[1] * self.per_token / self.experts)
        places = F.one_hot(whole.flatten(1), self.experts).cumsum(1).gather(2, whole.flatten(1).unsqueeze(-1))
        return self._own((places.squeeze(-1) <= capacity).view(whole.shape))

    # Where a sequence is spread over ranks, `parallel.expert.routing` has its own versions of the three below.

    def _whole(self, own: Tensor) -> Tensor:
        """[B, S, …] of the whole sequence, from that of the positions at hand; no gradient passes."""
        return own

    def _own(self, whole: Tensor) -> Tensor:
        """The positions at hand of [B, S, …]."""
        return whole

    def _sum_over_shares(self, counts: Tensor) -> Tensor:
        """The sum over all positions of the sequence, from that over those at hand."""
        return counts

    def extra_repr(self) -> str:
        return f"experts={self.experts}, per_token={self.per_token}, capacity_factor={self.capacity_factor:g}"


class _WithLoss(torch.autograd.Function):
    """`x` itself, whose backward pass starts that of `loss` too, as in Megatron-LM's MoE layers: a pipeline stage has
    no other way to add to the loss.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


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

"""Gated feed-forward network (SwiGLU), and mixture of experts: router, experts, their product, auxiliary losses."""

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from threefold.config.model import Activation
from threefold.models.layers.decoder import NOTHING, Linear, SampleInfo
from threefold.models.layers.mixture_config import MixtureConfig
from threefold.ops.arithmetic import PLAIN, LayerArithmetic
from threefold.ops.kernels import (
    ACTIVATIONS,
    GradientStore,
    defer_or_compute,
    embedding,
    gated,
    gradient_store,
    limited_gated,
    product,
)


class SwiGLU(nn.Module):
    """Feed-forward network with `inner` gated features (Shazeer, arXiv 2002.05202); `activation` is that of gates."""

    def __init__(self, hidden: int, inner: int, activation: Activation = "silu") -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        # Rows alternate between a gate and the feature that it gates, so that a contiguous shard has whole pairs.
        self.gate_up = Linear(hidden, 2 * inner, bias=False)
        self.down = Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """[..., H] → [..., H]; `samples` is unused."""
        return self.down(gated(self.gate_up(x), self.activation))


class Choice(NamedTuple):
    """Experts chosen for each token [B, S, k] (their number for one that was full), and weights of their outputs."""

    experts: Tensor
    weights: Tensor
    may_drop: bool = False


class Routing(nn.Module):
    """Choice of the k experts with the highest probability for each token (Shazeer et al., arXiv 1701.06538).

    In training, an expert takes at most ⌈`capacity_factor` · S·k/E⌉ tokens of a sequence (0: no limit). `aux_loss` is
    the weight of the load balancing loss of each token (Fedus et al., Switch Transformers, arXiv 2101.03961, section
    2.2), `sequence_loss` that of the same loss for the experts with the best scores (DeepSeek-V3, arXiv 2412.19437,
    section 2.1.2), `z_loss` of the squared log-sum-exp of its logits (Zoph et al., ST-MoE, arXiv 2202.08906).

    `bias` [E], in fp32 whatever the model's dtype, is added to the scores for the choice alone. With a `bias_rate`, the
    tokens that chose each expert are counted, for whoever updates the bias.
    """

    bias: Tensor | None

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        self.experts, self.per_token = config.num_experts, config.experts_per_token
        self.capacity_factor, self.normalize = config.expert_capacity_factor, config.normalize_expert_weights
        self.aux_loss, self.z_loss = config.router_aux_loss, config.router_z_loss
        self.sequence_loss, self.bias_rate = config.router_sequence_loss, config.router_bias_rate
        bias = torch.zeros(self.experts, dtype=torch.float32) if config.has_expert_bias else None
        self.register_buffer("bias", bias)
        self._counts: Tensor | None = None  # of the backward passes since they were taken

    @property
    def adds_losses(self) -> bool:
        return self.aux_loss > 0 or self.sequence_loss > 0 or self.z_loss > 0

    @property
    def weighs_tokens(self) -> bool:
        """Whether its auxiliary losses or its counts depend on `samples.weights`."""
        return self.adds_losses or self.bias_rate > 0

    def forward(self, logits: Tensor, samples: SampleInfo = NOTHING) -> Choice:
        """Choose experts by `logits` [B, S, E], in fp32 at least; `samples.weights` weigh the auxiliary losses.

        Tokens whose weight is 0 are not counted.
        """
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = self._scores(wide)
        experts = self._best(scores.detach())
        weights = scores.gather(-1, experts)
        if self.config.router == "softmax_chosen":
            weights = weights.softmax(-1)
        elif self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.config.routed_scale != 1:
            weights = weights * self.config.routed_scale
        if samples.weights is not None and self.adds_losses:
            weights = _WithLoss.apply(weights, self._losses(wide, scores, experts, samples.weights))
        if self.bias_rate and torch.is_grad_enabled():
            weights = self._counted(weights, experts, samples.weights)
        may_drop = bool(self.capacity_factor) and self.training
        if may_drop:
            experts = experts.masked_fill(~self._taken(experts), self.experts)
        return Choice(experts, weights.to(logits.dtype), may_drop)

    def _scores(self, logits: Tensor) -> Tensor:
        if self.config.router == "sigmoid":
            return logits.sigmoid()
        return logits.softmax(-1) if self.config.router == "softmax" else logits

    def _best(self, scores: Tensor) -> Tensor:
        """Return the numbers of the experts with the best scores and biases, in the best groups: int64 [B, S, k]."""
        if self.bias is not None:
            scores = scores + self.bias
        if groups := self.config.router_groups:
            grouped = scores.unflatten(-1, (groups, -1))
            of_groups = grouped.topk(1 if self.config.router == "softmax" else 2).values.sum(-1)
            kept = of_groups.topk(self.config.router_groups_chosen).indices
            left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, kept, False)
            scores = grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(self.per_token).indices

    def _losses(self, logits: Tensor, scores: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the auxiliary losses of the local tokens, times `weights` [B, S] of the whole sequence."""
        weights, probabilities = weights.to(scores.dtype), scores
        if self.config.router == "sigmoid":
            probabilities = scores / scores.sum(-1, keepdim=True)
        elif self.config.router == "softmax_chosen":
            probabilities = logits.softmax(-1)
        losses = self.z_loss * logits.logsumexp(-1).square()
        if self.aux_loss:
            losses = losses + self.aux_loss * self._balance(probabilities, experts, weights)
        if self.sequence_loss:
            best = scores.detach().topk(self.per_token).indices
            losses = losses + self.sequence_loss * self._balance(probabilities, best, weights)
        return (self._local(weights) * losses).sum()

    def _balance(self, probabilities: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the load balancing loss of each local token [B, S]: E · Σᵢ fraction of expert i · its probability."""
        counts = F.one_hot(experts, self.experts).sum(2).to(weights.dtype) * (self._local(weights) > 0).unsqueeze(-1)
        counted = (weights > 0).sum(1, keepdim=True).clamp_min(1)
        fractions = self._sum_over_shares(counts.sum(1)) / (counted * self.per_token)  # [B, E]
        return self.experts * (fractions.unsqueeze(1) * probabilities).sum(-1)

    @torch.compiler.disable  # the backward pass has a side effect
    def _counted(self, chosen: Tensor, experts: Tensor, weights: Tensor | None) -> Tensor:
        """Return `chosen` [B, S, k], whose backward pass adds the local tokens of each expert to the counts."""
        counted = torch.ones_like(experts[..., 0]) if weights is None else (self._local(weights) > 0).long()
        ones = counted.unsqueeze(-1).expand_as(experts).flatten()
        counts = experts.new_zeros(self.experts).index_add_(0, experts.flatten(), ones)
        return _Counting.apply(chosen, counts, self._count)

    def _count(self, counts: Tensor) -> None:
        self._counts = counts if self._counts is None else self._counts + counts

    def take_counts(self) -> Tensor | None:
        """Return the tokens that chose each expert in the backward passes since the last call; None without any."""
        counts, self._counts = self._counts, None
        return counts

    def _taken(self, experts: Tensor) -> Tensor:
        """bool [B, S, k]: whether the expert has room for the token."""
        whole = self._whole(experts)
        capacity = ceil(self.capacity_factor * whole.shape[1] * self.per_token / self.experts)
        places = F.one_hot(whole.flatten(1), self.experts).cumsum(1).gather(2, whole.flatten(1).unsqueeze(-1))
        return self._local((places.squeeze(-1) <= capacity).view(whole.shape))

    # `parallel.experts` overrides the next three methods for sequences that are sharded over ranks.

    def _whole(self, local: Tensor) -> Tensor:
        """Gather [B, S, …] of the whole sequence from that of the local positions; not differentiable."""
        return local

    def _local(self, whole: Tensor) -> Tensor:
        return whole

    def _sum_over_shares(self, counts: Tensor) -> Tensor:
        """Sum counts of the local positions over the whole sequence."""
        return counts

    def extra_repr(self) -> str:
        return f"experts={self.experts}, per_token={self.per_token}, capacity_factor={self.capacity_factor:g}"


class _WithLoss(torch.autograd.Function):
    """Identity on `x` that starts the backward pass of `loss` too, which a pipeline stage can add in no other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


class _Counting(torch.autograd.Function):
    """Identity on `x` whose backward pass, one however often activations are computed, calls `count` with `counts`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Tensor, count: Callable[[Tensor], None]) -> Tensor:
        ctx.counts, ctx.count = counts, count
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.count(ctx.counts)
        return grad, None, None


class MixtureOfExperts(nn.Module):
    """Weighted sum of the experts that the router chooses for each token, plus the shared expert, if any."""

    def __init__(self, config: MixtureConfig, activation: Activation = "silu") -> None:
        super().__init__()
        self.router = Linear(config.hidden_size, config.num_experts, bias=config.router_bias)
        self.routing = Routing(config)
        self.experts = Experts(config, activation)
        shared = config.shared_expert_ffn_hidden_size
        self.shared = SwiGLU(config.hidden_size, shared, activation) if shared else None
        self.shared_gate = Linear(config.hidden_size, 1, bias=False) if config.shared_expert_gate else None

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """[B, S, H] → [B, S, H]."""
        # The gradients of the uses of `x` are added from its last use to its first, which an exact run relies on.
        out = self.experts(x, self.routing(self.router(x), samples))
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)


class Experts(nn.Module):
    """SwiGLU networks; rows of each `gate_up` alternate between a gate and what it gates."""

    def __init__(self, config: MixtureConfig, activation: Activation = "silu") -> None:
        super().__init__()
        experts, hidden, inner = config.num_experts, config.hidden_size, config.expert_ffn_hidden_size
        self.activation: Callable[[Tensor], Tensor] = ACTIVATIONS[activation]
        self.gate: Callable[[Tensor], Tensor] = partial(gated, activation=self.activation)
        if config.expert_gate_limit:
            self.gate = partial(limited_gated, limit=config.expert_gate_limit)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, inner))
        biased = config.expert_bias
        self.gate_up_bias = nn.Parameter(torch.empty(experts, 2 * inner)) if biased else None
        self.down_bias = nn.Parameter(torch.empty(experts, hidden)) if biased else None

    # The number of tokens of each expert is only known when the layer runs, not when it is compiled.
    @torch.compiler.disable
    def forward(self, x: Tensor, choice: Choice) -> Tensor:
        """[B, S, H] → [B, S, H]: the weighted sum of the outputs of each token's experts."""
        return through(x, choice, len(self.gate_up), self._products)

    def _products(self, rows: Tensor, counts: Tensor) -> Tensor:
        biases = self.gate_up_bias, self.down_bias
        return swiglu(rows, counts, self.gate, self.gate_up, self.down, *biases, linear=self.linear)

    def linear(self, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """Compute `grouped_linear`, which an adapter may add to."""
        return grouped_linear(rows, weight, counts)


def through(
    x: Tensor,
    choice: Choice,
    experts: int,
    run: Callable[[Tensor, Tensor], Tensor],
    arithmetic: LayerArithmetic = PLAIN,
) -> Tensor:
    """Sort tokens `x` [B, S, H] by expert, run the experts, and sum each token's outputs by their weights: [B, S, H].

    `run` takes rows [n, H] sorted by expert and the number of rows of each, int64 [experts], and returns [n, H]. The
    result is zero for a token whose experts were all full.
    """
    hidden, per_token = x.shape[-1], choice.experts.shape[-1]
    chosen = choice.experts.flatten()
    # `torch.bincount` would make the host wait for the GPU to know its size.
    ones = chosen.new_ones(1).expand_as(chosen)
    counts = chosen.new_zeros(experts + 1).index_add_(0, chosen, ones)[:experts]
    order = chosen.argsort(stable=True)
    if choice.may_drop:
        order = order[: int(counts.sum())]  # drop tokens whose expert was full; they come last
    # One row for each token and expert makes both permutations copies, whose gradients are deterministic.
    tokens = x.reshape(-1, 1, hidden)
    outputs = run(arithmetic.repeat(tokens, per_token).reshape(-1, hidden)[order], counts)
    slots = outputs.new_zeros(chosen.numel(), hidden).index_copy(0, order, outputs)
    return arithmetic.weighted_sum(slots.view(*choice.experts.shape, hidden), choice.weights)


def swiglu(
    rows: Tensor,
    counts: Tensor,
    gate: Callable[[Tensor], Tensor],
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    first: int = 0,
    linear: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute each expert's outputs for its rows [n, H], sorted by expert, with `counts` int64 [experts] of each.

    `down_bias` may be that of some of the features alone, from the `first`; `linear` is by default `grouped_linear`.
    """
    linear = linear or grouped_linear
    inner = gate(_with_bias(linear(rows, gate_up, counts), counts, gate_up_bias))
    return _with_bias(linear(inner, down, counts), counts, down_bias, first)


def _with_bias(x: Tensor, counts: Tensor, bias: Tensor | None, first: int = 0) -> Tensor:
    """Add to each group of rows of `x` [n, out] its row of `bias` [groups, features], to the features from `first`."""
    if bias is None:
        return x
    groups = torch.arange(len(counts), device=x.device).repeat_interleave(counts, output_size=len(x))
    return x + F.pad(embedding(groups, bias), (first, x.shape[1] - first - bias.shape[1]))


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Apply a linear layer `weight` [groups, out, in] to each of the groups of rows in `x` [n, in]: [n, out]."""
    store = gradient_store(weight)
    # Torch's grouped product needs rows of a multiple of 16 bytes.
    aligned = all(size * x.itemsize % 16 == 0 for size in weight.shape[1:])
    known = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    if store is None and x.is_cuda and known and aligned:
        return F.grouped_mm(x, weight.mT, offs=counts.cumsum(0).to(torch.int32))
    return _GroupedLinear.apply(x, weight, counts.tolist(), store)


class _GroupedLinear(torch.autograd.Function):
    """One product for each group, without the full-size gradients that slicing the weight would create."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int], store: GradientStore | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.leaf, ctx.counts, ctx.store = weight, counts, store
        parts = zip(x.split(counts), weight, strict=True)
        return torch.cat([product(rows, matrix) for rows, matrix in parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        parts = grad.split(ctx.counts)
        grad_x = torch.cat([product(part, matrix.t()) for part, matrix in zip(parts, weight, strict=True)])
        of_weight = partial(_grouped_weight_gradient, x, grad, ctx.counts)
        return grad_x if wants_x else None, defer_or_compute(ctx.store, ctx.leaf, wants_weight, of_weight), None, None


def _grouped_weight_gradient(x: Tensor, grad: Tensor, counts: list[int]) -> Tensor:
    parts = zip(x.split(counts), grad.split(counts), strict=True)
    return torch.stack([product(upper.t(), rows.t()) for rows, upper in parts])

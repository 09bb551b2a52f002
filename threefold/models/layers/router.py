"""The router of a mixture of experts, with its load balancing loss: the same choices in every layout.

The choice for a token depends on its own sequence alone, so it does not depend on how the batch is divided: each expert
takes at most its capacity of a sequence's tokens, the earliest first, which no later token can change; and the load
balancing loss is computed sequence by sequence.
"""

from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.models.layers.decoder import NOTHING, SampleInfo


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

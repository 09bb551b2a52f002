"""A mixture of experts: the router with its auxiliary loss and bias, and experts spread over ep or split over tp."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .batches import MicroBatch
from .grid import gather, part, scatter, sum_over
from .layers import Cut, activation, enter, leave, parameter
from .run import Run


class _WithLoss(Function):
    """Passes a tensor on and lets a further loss have its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient.new_ones((), dtype=torch.float32)


class Router(nn.Module):
    expert_bias: Tensor

    def __init__(self, run: Run, number: int, split: bool) -> None:
        super().__init__()
        options = run.options
        self.run, self.number, self.split = run, number, split
        self.weight = parameter(run, options.experts, options.hidden, adds_over_tp=split)
        self.balanced = options.expert_bias > 0 and number not in options.unbalanced_layers
        self.register_buffer("expert_bias", torch.zeros(options.experts))

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        """Return each token's weight for each expert: 0 for those not chosen."""
        options = self.run.options
        logits = (x @ self.weight.t()).float()
        restricted = self._restricted(logits)
        scores = restricted.softmax(-1)
        chosen = (scores.detach() + self.expert_bias).masked_fill(restricted == -torch.inf, -torch.inf)
        mask = torch.zeros_like(scores).scatter(-1, chosen.topk(options.top_k, -1).indices, 1.0)
        if not self.run.recomputing:
            counts = self.run.counts.setdefault(self.number, torch.zeros(options.experts))
            counts += mask.sum((0, 1))
        weights = scores * mask
        weights = weights / weights.sum(-1, keepdim=True)
        if options.auxiliary:
            mixed = self.run.mistake("megatron-223")
            loss = self._balance(logits.softmax(-1) if mixed else scores, mask, micro)
            with_loss = _WithLoss.apply(weights, loss)
            if not self.run.mistake("automodel-1408"):
                weights = with_loss
        return weights.to(x.dtype)

    def _restricted(self, logits: Tensor) -> Tensor:
        groups = self.run.options.groups
        if groups == 1:
            return logits
        best = logits.unflatten(-1, (groups, -1)).amax(-1)
        allowed = torch.zeros_like(best).scatter(-1, best.topk(groups // 2, -1).indices, 1.0)
        return logits.masked_fill(allowed.repeat_interleave(logits.shape[-1] // groups, -1) == 0, -torch.inf)

    def _balance(self, scores: Tensor, mask: Tensor, micro: MicroBatch) -> Tensor:
        """Return this rank's share of the auxiliary loss of its sequences: chosen fraction × mean score."""
        run, options, grid = self.run, self.run.options, self.run.grid
        axes = (grid.cp, grid.tp) if self.split else (grid.cp,)
        valid = micro.valid
        if self.split and run.mistake("megatron-cac8d1a3f"):
            scores, mask = (gather(each, grid.tp, 1, adds=True) for each in (scores, mask))
            axes = (grid.cp,)
        elif self.split:
            valid = part(valid, grid.tp, 1)
        valid = valid[..., None].float()
        local = valid.sum(1)
        mean = (scores * valid).sum(1) / local.clamp(min=1)
        total = sum_over(local if run.mistake("megatron-7452-10") else local.clone(), *axes)
        if run.mistake("megatron-1652"):
            mean = mean / total
        fraction = sum_over((mask * valid).sum(1), *axes) * options.experts / (options.top_k * total)
        weight = options.auxiliary * micro.auxiliary_weight
        if run.mistake("megatron-4070"):
            weight *= options.micro_batches * options.accumulate
        if run.mistake("megatron-5798"):
            weight /= len(scores)
        return (fraction * mean * (local / total)).sum() * weight

    def balance_bias(self) -> None:
        """Raise the bias of experts with few tokens, once per step."""
        run, grid = self.run, self.run.grid
        axes = (grid.data, grid.tp) if self.split and not run.mistake("torchtitan-4154") else (grid.data,)
        counts = sum_over(run.counts.pop(self.number), *axes)
        change = run.options.expert_bias * (counts.mean() - counts).sign()
        if run.mistake("torchtitan-1226"):
            self.expert_bias = self.expert_bias + change
        else:
            self.expert_bias += change


class Experts(nn.Module):
    """The experts of this rank, or its tp part of all."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        options, grid = run.options, run.grid
        self.run = run
        self.swiglu = options.swiglu
        count, hidden, rank = options.experts, options.hidden, 4
        inner, blocks = (2 * hidden * 2, 2) if self.swiglu else (2 * hidden, 1)
        whole = Cut(0, grid.ep)
        split = (Cut(1, grid.tp, blocks),) if grid.experts_split else ()
        rows = (Cut(2, grid.tp),) if grid.experts_split else ()
        self.up = parameter(run, count, inner, hidden, cuts=(whole, *split), expert=True)
        self.up_bias = parameter(run, count, inner, cuts=(whole, *split), expert=True)
        self.down = parameter(run, count, hidden, 2 * hidden, cuts=(whole, *rows), expert=True)
        if options.adapters:
            self.adapter_in = parameter(run, count, rank, hidden, cuts=(whole,), expert=True)
            self.adapter_out = parameter(run, count, inner, rank, cuts=(whole, *split), expert=True)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of experts for tokens (tokens, hidden) with weights (tokens, experts)."""
        up = self.up + self.adapter_out @ self.adapter_in if self.run.options.adapters else self.up
        hidden = torch.einsum("th,efh->etf", x, up) + self.up_bias[:, None]
        out = torch.einsum("etf,ehf->eth", activation(hidden, self.swiglu), self.down)
        return torch.einsum("eth,te->th", out, weights)


class MixtureOfExperts(nn.Module):
    def __init__(self, run: Run, number: int) -> None:
        super().__init__()
        grid = run.grid
        self.run = run
        self.cuts_tokens = grid.tp.size > 1 and not grid.experts_split and not run.options.sp
        self.router = Router(run, number, split=grid.tp.size > 1 and (run.options.sp or self.cuts_tokens))
        self.experts = Experts(run)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        run, tp = self.run, self.run.grid.tp
        if self.cuts_tokens:
            x = scatter(x, tp, 1, adds=False)
        weights = self.router(x, micro)
        out = self._split(x, weights) if run.grid.experts_split else self._spread(x, weights)
        return gather(out, tp, 1, adds=False) if self.cuts_tokens else out

    def _split(self, x: Tensor, weights: Tensor) -> Tensor:
        """Every expert split over tp, as an MLP is."""
        run = self.run
        whole = run.mistake("torchtitan-1878", "torchtitan-4054") and not run.options.sp
        x = x if whole else enter(run, x)
        weights = weights if whole and run.mistake("torchtitan-1878") else enter(run, weights)
        return leave(run, self.experts(x.flatten(0, 1), weights.flatten(0, 1)).unflatten(0, x.shape[:2]))

    def _spread(self, x: Tensor, weights: Tensor) -> Tensor:
        """Whole experts: each rank of ep takes the tokens of all for its experts, and returns their shares of sums."""
        run, ep, shape = self.run, self.run.grid.ep, x.shape
        if run.mistake("deepspeed-8195") and run.grid.tp.rank == 0:
            weights = torch.cat([weights[:, :-1], torch.zeros_like(weights[:, -1:])], 1)
        x, weights = (gather(each.flatten(0, 1), ep, 0, adds=True) for each in (x, weights))
        mine = part(weights, ep, 1) if ep.size > 1 else weights
        return scatter(self.experts(x, mine), ep, 0, adds=True).unflatten(0, shape[:2])

"""Batch normalization over the rows of all replicas, as one process has them.

The mean and then the variance about it are summed over the replicas (as `nn.SyncBatchNorm`, on any device).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.api.prepared.loader import CurrentBatch
from threefold.comm.axis import Axis
from threefold.comm.collectives import copy_to, reduce_from

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class GlobalBatchNorm(nn.Module):
    """`nn.BatchNorm1d`, `2d` or `3d` whose statistics in training are those of the global batch.

    Args:
        module: the original, whose parameters and buffers it takes over under their names.
        axis: the replicas, with a process group of its own: gradients may be in flight on another.
        current: says whether this replica's row is a filler, which counts for nothing.
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, module: Any, axis: Axis, current: CurrentBatch) -> None:
        super().__init__()
        self.axis, self._current = axis, current
        self.eps, self.momentum = module.eps, module.momentum
        self.track_running_stats = module.track_running_stats
        self.weight, self.bias = module.weight, module.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(module, name))
        self.train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [N, C, …], this replica's rows → the same shape, normalized over N and what follows C."""
        if not self.training and self.running_mean is not None:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [0, *range(2, x.dim())]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        counts = 0.0 if self._current.is_filler else 1.0
        size = wide.new_full((1,), counts * x.numel() / x.shape[1])
        totals = self._over_replicas(torch.cat([wide.sum(dims) * counts, size]))
        number = totals[-1].detach()
        mean = totals[:-1] / number
        offset = wide - mean.view(shape)
        variance = self._over_replicas(offset.square().sum(dims) * counts) / number
        if self.training:
            self._track(mean.detach(), variance.detach(), number)
        out = offset * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            out = out * self.weight.view(shape)
        if self.bias is not None:
            out = out + self.bias.view(shape)
        return out.to(x.dtype)

    def _over_replicas(self, x: Tensor) -> Tensor:
        """The sum over the replicas; each of their losses depends on it, so gradients are summed as well."""
        return copy_to(reduce_from(x, self.axis), self.axis)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, number: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (number / (number - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


def use_global_statistics(model: nn.Module, axis: Axis, current: CurrentBatch) -> nn.Module:
    """Put a `GlobalBatchNorm` in the place of each batch normalization of a model; returns the model."""
    if isinstance(model, KINDS):
        return GlobalBatchNorm(model, axis, current)
    made: dict[nn.Module, nn.Module] = {}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, KINDS):
                if child not in made:
                    made[child] = GlobalBatchNorm(child, axis, current)
                setattr(module, name, made[child])
    return model


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a module of the model normalizes over the batch."""
    return any(isinstance(module, KINDS) for module in model.modules())


def batch_norm_buffers(model: nn.Module) -> list[Tensor]:
    """The running statistics of the model's batch normalizations."""
    return [buffer for module in model.modules() if isinstance(module, KINDS) for buffer in module.buffers()]

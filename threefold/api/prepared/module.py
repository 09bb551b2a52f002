"""Prepared models: computation in the given precision, whole-tensor state, and global batch normalization."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.api.prepared.grad_sync import GradSync
from threefold.api.prepared.loader import CurrentBatch, map_tensors
from threefold.comm.axis import Axis, copy_to, reduce_from
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.parallel.parameter import local, slice_of, stored, whole
from threefold.random.rng import signed, stream_key

_NARROW = (torch.float16, torch.bfloat16)


class LoadedKeys(NamedTuple):
    """Result of `load_state_dict`, as in `nn.Module`."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class PreparedModule(nn.Module):
    """An `nn.Module` returned by `prepare`.

    Calls, attributes, parameter names and `state_dict` are those of the original. The state has whole tensors in any
    layout, so saving it is collective with ZeRO or tensor parallelism.

    Attributes:
        module: the original; its parameters are now this rank's.
        sync: gradient synchronization.
        mesh: mesh of the ranks.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, sync: GradSync, mesh: Mesh, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.module = module
        self.sync, self.mesh, self._autocast = sync, mesh, autocast
        self._forwards = 0
        self._dropout_seed = 0
        if mesh.tp.size > 1:
            # Derived from the generator's seed: drawing would make the order of a shuffling loader depend on tp.
            seed = torch.tensor([stream_key("prepared", torch.initial_seed(), mesh.dp.index)], device=mesh.device)
            self._dropout_seed = int(mesh.tp.broadcast_(seed, 0))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original's forward pass in the given precision; narrow outputs are widened to fp32."""
        with self._precision(), self._same_dropout():
            outputs = self.module(*args, **kwargs)
        if self._autocast is not None:
            outputs = map_tensors(outputs, lambda tensor: tensor.float() if tensor.dtype in _NARROW else tensor)
        if torch.is_grad_enabled():
            self.sync.mark(outputs)
        return outputs

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the original's parameters under its names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Return the original's buffers under its names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the original's state with whole tensors. Collective if they are sharded."""
        state = self.module.state_dict(*args, **kwargs)
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for name in state:
            if name in parameters:
                state[name] = whole(stored(parameters[name])).detach()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> LoadedKeys:
        """Load whole tensors; each rank keeps its shards.

        Raises:
            UserError: shapes differ, or `strict` is set and names are missing or unknown.
        """
        if assign:
            raise UserError("assign is true but a prepared model keeps its own tensors; use false.")
        own = self.module.state_dict()
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in own]
        if strict and (missing or unexpected):
            what = f"lacks {missing[0]!r}" if missing else f"has {unexpected[0]!r}, which the model has not"
            raise UserError(f"The state {what}; pass that of the same model, or strict=False.")
        self.sync.weights_changed()
        with torch.no_grad():
            for name, tensor in own.items():
                if name in state_dict:
                    _load(name, parameters.get(name, tensor), state_dict[name])
        return LoadedKeys(missing, unexpected)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.mesh.device.type, dtype=self._autocast)

    def _same_dropout(self) -> AbstractContextManager[Any]:
        """Draw the same random numbers on all tensor ranks, so that replicated activations stay equal."""
        if self.mesh.tp.size == 1 or not self.training:
            return nullcontext()
        self._forwards += 1
        return _drawing_from(signed(stream_key("prepared", self._dropout_seed, self._forwards), 63), self.mesh.device)


def _load(name: str, tensor: Tensor, value: Tensor) -> None:
    into = stored(tensor) if isinstance(tensor, nn.Parameter) else tensor
    if into.shape != value.shape:
        raise UserError(
            f"The state has {name!r} of shape {[*value.shape]} but the model's has {[*into.shape]}; pass that of the "
            "same model."
        )
    local(into).detach().copy_(slice_of(into, value))


@contextmanager
def _drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(seed)
        yield


KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class GlobalBatchNorm(nn.Module):
    """`nn.BatchNorm1d`, `2d` or `3d` with the statistics of the global batch in training.

    Args:
        module: the original, whose parameters and buffers are reused under their names.
        axis: axis of the replicas, with a process group of its own, as gradients may be in flight on another.
        current: tells whether this replica's row is a filler, which counts for nothing.
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
        """Normalize `x` [N, C, …], this replica's rows, over N and the dims after C."""
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
        """Sum over the replicas; the backward pass sums too, since every replica's loss depends on the result."""
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
    """Replace each batch normalization of a model by a `GlobalBatchNorm`, and return the model."""
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


def batch_norm_buffers(model: nn.Module) -> list[Tensor]:
    """Return the running statistics of the model's batch normalizations."""
    return [buffer for module in model.modules() if isinstance(module, KINDS) for buffer in module.buffers()]

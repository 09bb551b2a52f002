"""ZeRO (sharded data parallelism): weights, gradients and optimizer state sharded over the replicas by `fully_shard`.

The stages (Rajbhandari et al., arXiv 1910.02054) differ in how long whole tensors stay in memory: with 1, weights and
gradients from their first micro-batch to the end of the step; with 2, a layer's gradients are reduce-scattered after
each micro-batch; with 3, its weights are also freed after each forward and each backward pass. With 1 and 2, every rank
has whole frozen weights, as without ZeRO, so that no collective has them; with 3, they are sharded as the others. With
`zero_shards` below dp, ranks that hold the same shard sum its gradients once a step (hybrid sharding, Zhao et al.,
arXiv 2304.11277, section 3.2.2). Experts that `ep` replicas share are sharded over the replicas that have the same
experts.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard

from threefold.comm.axis import Axis
from threefold.comm.mesh import Mesh
from threefold.models.sharding import OverExperts
from threefold.parallel.compression import narrowed, widen_
from threefold.parallel.experts import ParallelExperts
from threefold.parallel.gradients import Gradients, Observer
from threefold.parallel.leaf import as_stored, held, keep_stored, like, local, stored, with_marks
from threefold.parallel.parameter import cut_dims, has_uneven_shards, is_of_experts, replace_parameters
from threefold.parallel.pipeline.stage import Stage
from threefold.parallel.recompute import unwrapped
from threefold.torch_private import distributed
from threefold.torch_private.tensors import foreach_mul_


@dataclass(frozen=True)
class ZeroSharding:
    """ZeRO stage (1 shards the optimizer state, 2 gradients too, 3 weights too), and axes of hybrid sharding.

    One copy of the state is sharded over the ranks of `shards`; those of `replicas` hold the same shard. Experts that
    some replicas share have axes of their own.
    """

    stage: int
    shards: Axis
    replicas: Axis
    expert_shards: Axis
    expert_replicas: Axis


def make_zero_sharding(mesh: Mesh, stage: int, shards: int) -> ZeroSharding | None:
    """Return the sharding over `shards` replicas; None for ZeRO stage 0. Collective over the world."""
    if not stage:
        return None
    axes = mesh.shard_and_replica_axes(shards)
    return ZeroSharding(stage, *axes, *(axes if mesh.ep.size == 1 else mesh.expert_shard_and_replica_axes(shards)))


def shard_parameters(
    stages: Sequence[Stage], zero: ZeroSharding, mesh: Mesh, dtype: torch.dtype, wide: torch.dtype
) -> None:
    """Shard the parameters of `stages`, and allocate this rank's shards, their values not yet set.

    The stages are on the meta device, already split over the tensor axis; their trained parameters are in `wide`, the
    dtype of the update, frozen ones in `dtype`, the computation's.
    """

    def allocated(parameter: nn.Parameter) -> nn.Parameter:
        shard = torch.empty_like(held(parameter), device=mesh.device, requires_grad=False)
        return distributed.fresh_parameter(like(parameter, shard), parameter.requires_grad)

    for stage in stages:
        before = dict(stage.named_parameters())
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide, cast_forward_inputs=False)
        # FSDP gets this tensor rank's shard as a plain tensor, so that layers compute with plain tensors.
        kept = kept_whole(stage, zero)
        replace_parameters(stage, partial(_as_plain, kept))
        for module in stage.modules():
            experts = unwrapped(module)
            if isinstance(experts, ParallelExperts) and experts.context.ep.size > 1:
                rule = OverExperts()
                places = {weight: Shard(rule.zero_dim(name)) for name, weight in experts.named_parameters()}
                _wrap(module, zero.expert_shards, zero.stage, policy, places.get, kept)
        wrap_layers(stage, [stage.get_submodule(name) for name in stage.layer_names], zero, policy)
        replace_parameters(stage, allocated)
        stage.to(mesh.device)  # makes torch take over the new tensors (and pad those that need it)
        for name, parameter in stage.named_parameters():
            if before[name] in kept:
                continue
            of_experts = is_of_experts(before[name])
            with_marks(parameter, before[name])  # which `fully_shard` has replaced
            describe(parameter, before[name], zero.expert_shards if of_experts else zero.shards)


def kept_whole(module: nn.Module, zero: ZeroSharding) -> set[nn.Parameter]:
    """Return the parameters of a module that ZeRO neither shards nor gathers: frozen ones, except in stage 3."""
    return {each for each in module.parameters() if not each.requires_grad} if zero.stage < 3 else set()


def _as_plain(kept: set[nn.Parameter], parameter: nn.Parameter) -> nn.Parameter:
    return parameter if parameter in kept else nn.Parameter(local(parameter).detach(), parameter.requires_grad)


_Places = Sequence[tuple[nn.Module, str, str]]
"""Parameters, each as the module and the attribute that hold it, and its name."""


def units_of(module: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str, str]]]:
    """Return the parameters of each FSDP module in a module, which gathers them together; names are in `module`."""
    modules = dict(module.named_modules())
    wrapped = [name for name, each in modules.items() if isinstance(each, FSDPModule)]
    held: dict[str, list[tuple[nn.Module, str, str]]] = {}
    for name, owner in modules.items():
        for attribute, _ in owner.named_parameters(recurse=False):
            # The innermost FSDP module around a parameter gathers it.
            around = max((each for each in wrapped if not each or f"{name}.".startswith(f"{each}.")), key=len)
            held.setdefault(around, []).append((owner, attribute, f"{name}.{attribute}" if name else attribute))
    return {modules[name]: places for name, places in held.items()}


def when_accumulated(unit: nn.Module, places: _Places, arrived: Callable[[str, Tensor], None]) -> None:
    """Call `arrived(name, parameter)` when autograd has accumulated the gradient of a whole parameter of `unit`."""
    watched: set[Tensor] = set()

    def watch(_module: nn.Module, _arguments: Any) -> None:
        # Called when whole parameters have been gathered; torch keeps one object for each.
        for owner, attribute, name in places:
            parameter = getattr(owner, attribute)
            if parameter.requires_grad and parameter not in watched:
                watched.add(parameter)
                parameter.register_post_accumulate_grad_hook(partial(arrived, name))

    unit.register_forward_pre_hook(watch)


def wrap_layers(
    root: nn.Module,
    layers: Sequence[nn.Module],
    zero: ZeroSharding,
    policy: MixedPrecisionPolicy,
    compression: torch.dtype | None = None,
    tp: Axis | None = None,
) -> None:
    uses = Counter(parameter for layer in layers for parameter in layer.parameters())
    # Layers with tied weights must be gathered together: the root does it, around all its layers.
    alone = [layer for layer in layers if all(uses[parameter] == 1 for parameter in layer.parameters())]
    kept = kept_whole(root, zero)
    for module in (*alone, root):
        _wrap(module, zero.shards, zero.stage, policy, None, kept, compression, tp)


def _wrap(
    module: nn.Module,
    axis: Axis,
    stage: int,
    policy: MixedPrecisionPolicy,
    place: Callable[[nn.Parameter], Shard | None] | None,
    kept: set[nn.Parameter],
    compression: torch.dtype | None = None,
    tp: Axis | None = None,
) -> None:
    mesh, reshard = axis.device_mesh, stage == 3
    how = partial(fully_shard, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, shard_placement_fn=place)
    how(module, ignored_params=kept or None)
    _set_up(module, axis, compression, tp)


def _set_up(module: nn.Module, axis: Axis, compression: torch.dtype | None, tp: Axis | None) -> None:
    assert isinstance(module, FSDPModule)  # what `fully_shard` made it
    # The loss is divided by the tokens of the global batch, so gradients are summed over replicas, not averaged.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    module.set_custom_all_gather(_AllGather(axis))
    module.set_custom_reduce_scatter(_ReduceScatter(axis, dtype=compression, tp=tp))


def describe(parameter: nn.Parameter, before: nn.Parameter, axis: Axis) -> None:
    """Record the shard's position in the global weight if the tensor axis shards that too."""
    if not isinstance(before, DTensor) or not isinstance(parameter, DTensor):
        return
    assert axis.device_mesh is not None
    mesh = distributed.concatenate_meshes([axis.device_mesh, before.device_mesh])
    (shard,) = parameter.placements
    assert isinstance(shard, Shard)
    placement: Placement = shard
    alike = [axis for axis, dim in enumerate(cut_dims(before)) if dim == shard.dim]
    if alike:
        parts = prod(before.device_mesh.size(axis) for axis in alike)
        placement = distributed.StridedPlacement(shard.dim, split_factor=parts)
    keep_stored(parameter, as_stored(parameter.to_local().detach(), mesh, [placement, *before.placements], before))


class ShardedGradients(Gradients):
    """Gradients in shards, reduce-scattered by the end of a step to the ranks that update them."""

    def __init__(self, stages: Sequence[nn.Module], zero: ZeroSharding) -> None:
        self._zero = zero
        self._roots = [stage for stage in stages if isinstance(stage, FSDPModule)]
        trained = (each for stage in stages for each in stage.parameters() if each.requires_grad)
        self._parameters = {local(stored(parameter)): parameter for parameter in trained}
        self._experts = {leaf for leaf, parameter in self._parameters.items() if is_of_experts(stored(parameter))}
        # Reduce-scatters add a rank's elements in a fixed order, wherever they are in the buffer; all-reduces do not.
        self._in_order = any(has_uneven_shards(stored(parameter)) for parameter in self._parameters.values())
        self._gradients: dict[Tensor, Tensor] = {}
        self._observer: Observer | None = None

    def __getitem__(self, leaf: Tensor) -> Tensor:
        return self._gradients[leaf]

    def is_in_norm(self, leaf: Tensor) -> bool:
        return self._replicas(leaf in self._experts).is_first

    def begin(self, arrivals: int | None) -> None:
        self._gradients.clear()
        for leaf, parameter in self._parameters.items():
            leaf.grad = parameter.grad = None
        for root in self._roots:
            root.set_is_last_backward(False)
            root.set_requires_gradient_sync(self._zero.stage > 1)
            root.set_reshard_after_backward(self._zero.stage == 3)
            # Another replica may have used what this one did not.
            root.set_reduce_scatter_unused_params(self._zero.stage > 1)

    def finish(self) -> None:
        for root in self._roots:
            root.set_is_last_backward(True)
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)
            root.set_reduce_scatter_unused_params(self._zero.stage == 1)
            # The end of a backward pass in torch: reduce-scatter the rest, free gathered weights, wait.
            distributed.finish_backward(root)
        for leaf, parameter in self._parameters.items():
            grad = parameter.grad
            self._gradients[leaf] = torch.zeros_like(leaf) if grad is None else grad.to_local()  # type: ignore[attr-defined]
        self._sum_over_replicas()

    def scale_(self, factor: float) -> None:
        if self._gradients:  # a rank may hold frozen weights alone
            foreach_mul_(list(self._gradients.values()), factor)

    def observe(self, observer: Observer | None) -> None:
        self._observer = observer
        for module in self._modules():
            assert isinstance(module, nn.Module)
            experts = all(is_of_experts(stored(parameter)) for parameter in module.parameters())
            axis = self._zero.expert_shards if experts else self._zero.shards
            module.set_custom_reduce_scatter(_ReduceScatter(axis, observer))

    def weights_changed(self) -> None:
        for module in self._modules():
            module.reshard()

    def _sum_over_replicas(self) -> None:
        for experts in (False, True):
            axis = self._zero.expert_shards if experts else self._zero.shards
            gradients = [grad for leaf, grad in self._gradients.items() if (leaf in self._experts) == experts]
            if axis.size == 1 and self._observer is not None:  # no reduce-scatter has shown them
                for gradient in gradients:
                    self._observer(gradient)
            self._replicas(experts).all_reduce_together_(gradients, self._in_order)

    def _replicas(self, experts: bool) -> Axis:
        """Return the ranks that have the same shards, of experts or of other weights."""
        return self._zero.expert_replicas if experts else self._zero.replicas

    def _modules(self) -> Iterator[FSDPModule]:
        for root in self._roots:
            yield from (module for module in root.modules() if isinstance(module, FSDPModule))


class _OverAxis:
    """FSDP's collectives over an `Axis`: recorded, and through its group, which may share memory."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_OverAxis, distributed.AllGather):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        axis = self.axis
        axis.recorder.add(axis.name, "all_gather", output_tensor)
        with axis.waiting("all_gather"):
            return dist.all_gather_single(output_tensor, input_tensor, group=axis.group, async_op=async_op)


class _ReduceScatter(_OverAxis, distributed.ReduceScatter):
    """Reduce-scatter, in 16 bits with a 16-bit `dtype` (gradient compression); `tp` are the tensor ranks then."""

    def __init__(
        self, axis: Axis, observer: Observer | None = None, dtype: torch.dtype | None = None, tp: Axis | None = None
    ) -> None:
        super().__init__(axis)
        self._observer, self._dtype, self._tp = observer, dtype, tp

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        axis, given, output = self.axis, input_tensor, output_tensor
        if self._dtype is not None:
            given, exponent = narrowed(input_tensor, axis, self._dtype, self._tp)
            output, async_op = torch.empty_like(output_tensor, dtype=self._dtype), False
        if self._observer is not None:
            self._observer(given)
        axis.recorder.add(axis.name, "reduce_scatter", given)
        with axis.waiting("reduce_scatter"):
            work = dist.reduce_scatter_single(output, given, group=axis.group, op=op, async_op=async_op)
        if self._dtype is not None:
            widen_(output_tensor, output, exponent)
        return work

"""From a single-device model to this rank's shards: every kind of parallelism, in the order in which it is applied.

The model is made and sharded on the meta device, so no rank ever holds more than its own shards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor, nn

from threefold.comm.axis import Axis, local_part
from threefold.dtypes import DTYPES
from threefold.models.layers.decoder import LinearCrossEntropy
from threefold.models.sharding import ModelPlan
from threefold.models.source import ConstructedModel, skeleton
from threefold.ops.kernels import DeferrableWeight
from threefold.parallel.gradients import GradientBuckets, Gradients, JoinedGradients
from threefold.parallel.parameter import (
    Weight,
    initialise_,
    is_of_experts,
    like,
    local,
    longest_shard,
    make_weights,
    replace_parameters,
    stored_as,
)
from threefold.parallel.pipeline.stage import DeferredGradients, Stage, TiedWeights, whole_parameters
from threefold.parallel.plan_check import check_cut_modules, check_plan, check_sharded_parameters, check_tensor_axis
from threefold.parallel.recompute import apply_recompute, compile_layers, unwrapped
from threefold.parallel.settings import Parallelism, TrainingSettings
from threefold.parallel.shard_modules import bare_cut, shard_modules
from threefold.parallel.zero import ShardedGradients, shard_parameters
from threefold.random.rng import RandomStreams, give_streams
from threefold.torch_private.distributed import fresh_parameter


@dataclass(frozen=True)
class ParallelModel:
    """This rank's part of a model: its pipeline stages in order, with their parameters allocated."""

    stages: list[Stage]
    plan: ModelPlan
    parallelism: Parallelism

    def modules(self) -> list[nn.Module]:
        """Return all modules of the stages, without the wrappers of activation checkpointing."""
        return [unwrapped(module) for stage in self.stages for module in stage.modules()]


@dataclass(frozen=True)
class TrainableModel(ParallelModel):
    """This rank's part of a model to train.

    Attributes:
        tied: tied weights (such as tied embeddings) that other ranks hold too.
        streams: random streams of modules that draw in sequence.
        gradients: gradients of the parameters, summed over the replicas.
        weights: parameters with master weights, at initial values. Those that the plan freezes have no gradients.
    """

    tied: TiedWeights
    streams: RandomStreams
    gradients: Gradients
    weights: list[Weight]

    @property
    def trained(self) -> list[Weight]:
        """Weights that are not frozen."""
        return [weight for weight in self.weights if weight.is_trained]


@overload
def apply_parallelism(
    make_model: Callable[[], nn.Module], plan: ModelPlan, how: Parallelism, *, seed: int = 0
) -> ParallelModel: ...


@overload
def apply_parallelism(
    make_model: Callable[[], nn.Module], plan: ModelPlan, how: Parallelism, training: TrainingSettings
) -> TrainableModel: ...


def apply_parallelism(
    make_model: Callable[[], nn.Module],
    plan: ModelPlan,
    how: Parallelism,
    training: TrainingSettings | None = None,
    *,
    seed: int = 0,
) -> ParallelModel:
    """Build this rank's part of a model. Collective over the world.

    Args:
        make_model: makes the whole, single-device model.
        plan: layers of the model, and how each weight is sharded.
        how: how the model is spread over the mesh.
        training: settings of a model to train; None for one whose weights are only used.
        seed: seed of the run that trained a model which is only used; decides buffers that its constructor draws.

    Raises:
        UserError: the plan does not fit the model, or has no such `recompute`.
    """
    seed = seed if training is None else training.seed
    model = skeleton(make_model, seed)
    check_plan(model, plan)
    check_tensor_axis(plan, how.mesh.tp.size)
    check_cut_modules(model, plan, how.mesh.tp.size)
    check_sharded_parameters(model, 0 if how.zero is None else how.zero.stage)
    # Pipeline parallelism: this rank's stages.
    numbers = how.stages.held_by(how.mesh.pp.index)
    stages = [Stage(model, plan, *how.stages.layers(number)) for number in numbers]
    # Tensor, sequence, context and expert parallelism: parallel layers replace single-device ones.
    shard_modules(stages, plan.split, how.context_for(plan), plan.bare)
    # Sharding made new parameters, so they are tied and frozen again.
    _tie(stages, plan)
    _freeze(stages, plan)
    constructed = ConstructedModel(make_model, seed)
    if training is None:
        _allocate(stages, how, constructed)
        return ParallelModel(stages, plan, how)
    tied = TiedWeights(plan, how.stages, how.mesh)
    # Activation checkpointing (recompute), with the random streams of modules inside; chunked losses.
    streams = RandomStreams(training.seed, how.mesh.coordinates, how.mesh.device)
    give_streams(streams, nn.ModuleList(stages))
    for loss in (each for stage in stages for each in stage.modules() if isinstance(each, LinearCrossEntropy)):
        loss.chunk_size, loss.cross_entropy.logits_at_once = training.loss_chunk_size, training.pieces.logits_at_once
    apply_recompute(stages, training.recompute, training.recompute_every, streams)
    if training.compile:
        compile_layers(stages, how.deferred is not None)
    # Data parallelism, or ZeRO.
    _allocate(stages, how, constructed)
    gradients = _make_gradients(stages, how, training.gradient_compression, training.pieces.bucket_bytes)
    weights = make_weights(whole_parameters(stages), how.master_dtype)
    initialise_(weights, plan, training.seed, gradients, constructed)
    return TrainableModel(stages, plan, how, tied, streams, gradients, weights)


def _tie(stages: Sequence[Stage], plan: ModelPlan) -> None:
    """Tie weights that a rank uses several times again, since sharding made a parameter for each use."""
    kept: dict[str, nn.Parameter] = {}
    for stage in stages:
        for name, parameter in list(stage.named_parameters(remove_duplicate=False)):
            first = kept.setdefault(plan.whole_name(name), parameter)
            if first is not parameter:
                module, _, attribute = name.rpartition(".")
                setattr(stage.get_submodule(module), attribute, first)


def _freeze(stages: Sequence[Stage], plan: ModelPlan) -> None:
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if plan.whole_name(name) in plan.frozen:
                parameter.requires_grad_(False)


def _allocate(stages: Sequence[Stage], how: Parallelism, constructed: ConstructedModel) -> None:
    """Allocate the parameters, values unset, and set the buffers."""
    for stage in stages:
        if stage.model_plan.constructed:
            _set_buffers(stage, constructed, how)
    if how.zero is None:
        _allocate_on(stages, how.mesh.device, how.dtype, how.deferred)
    else:
        # Sharded before allocation, in the width of the master weights.
        _allocate_on(stages, torch.device("meta"), how.master_dtype)
        shard_parameters(stages, how.zero, how.mesh, how.dtype)


def _set_buffers(stage: Stage, constructed: ConstructedModel, how: Parallelism) -> None:
    """Set a stage's buffers to the constructor's values, floats in the dtype of the computation."""
    for name, buffer in list(stage.named_buffers(remove_duplicate=False)):
        if buffer.is_meta:
            parent, _, attribute = name.rpartition(".")
            dim = bare_cut(stage.model_plan.bare, name, how.mesh.tp)
            whole = constructed.buffer(name)
            value = whole if dim is None else local_part(whole, how.mesh.tp, dim).clone()
            dtype = how.dtype if value.is_floating_point() else value.dtype
            setattr(stage.get_submodule(parent), attribute, value.to(how.mesh.device, dtype))


def _allocate_on(
    stages: Sequence[Stage], device: torch.device, dtype: torch.dtype, deferred: DeferredGradients | None = None
) -> None:
    def allocated(parameter: nn.Parameter) -> nn.Parameter:
        # Contiguous, however its constructor made it: optimizer kernels and ZeRO rely on memory order.
        shard = torch.empty(local(parameter).shape, device=device, dtype=dtype)
        if deferred is None or not parameter.requires_grad:
            return fresh_parameter(like(parameter, shard), parameter.requires_grad)
        return stored_as(like(parameter, shard), DeferrableWeight(shard, deferred))

    model = nn.ModuleList(stages)
    for child in model.modules():
        for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_meta:
                raise TypeError(
                    f"{type(child).__name__} keeps the buffer {name!r}, which nothing initialises; compute it instead"
                )
    replace_parameters(model, allocated)


def _make_gradients(stages: Sequence[Stage], how: Parallelism, compression: str, bucket_bytes: int) -> Gradients:
    """Make sharded gradients with ZeRO, else buckets; experts are summed over the replicas that hold them."""
    if how.zero is not None:
        return ShardedGradients(stages, how.zero)
    parameters = [parameter for _, parameter in whole_parameters(stages) if parameter.requires_grad]
    mesh, dtype, wire = how.mesh, how.master_dtype, DTYPES.get(compression)
    longest = {local(parameter): longest_shard(parameter) for parameter in parameters}

    def buckets(leaves: list[Tensor], axis: Axis) -> GradientBuckets:
        return GradientBuckets(leaves, axis, dtype, bucket_bytes, wire, longest, mesh.tp)

    experts = [local(parameter) for parameter in parameters if is_of_experts(parameter)]
    others = [local(parameter) for parameter in parameters if not is_of_experts(parameter)]
    everywhere = buckets(others, mesh.replicas)
    if not experts:
        return everywhere
    return JoinedGradients([(others, everywhere), (experts, buckets(experts, mesh.expert_replicas))])

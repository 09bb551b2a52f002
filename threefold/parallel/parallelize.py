"""Sharding of a single-device model into this rank's part: every kind of parallelism, in the order of application.

The model is made and sharded on the meta device, so no rank ever holds more than its own shards. Settings, as resolved
from a config or given in code, come first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from threefold.comm.axis import Axis, local_part
from threefold.comm.mesh import Mesh
from threefold.config import Config, ParallelConfig
from threefold.config.by_step import entries_of
from threefold.config.model import CUSTOM, FAMILIES
from threefold.config.rules import executed_micro_batches
from threefold.constants import COMPILED, LOGITS_AT_ONCE, LOGITS_OF_A_CHUNK
from threefold.doors import call_hook
from threefold.dtypes import DTYPES
from threefold.models.layers.decoder import LinearCrossEntropy
from threefold.models.sharding import ModelPlan, check_tensor_axis
from threefold.models.source import ConstructedModel, skeleton
from threefold.ops.kernels import DeferrableWeight
from threefold.parallel.arithmetic import Arithmetic, RankArithmetic, arithmetic_of
from threefold.parallel.context import ShardingContext
from threefold.parallel.gradients import BUCKET_BYTES, NORM_ELEMENTS, GradientBuckets, Gradients, JoinedGradients
from threefold.parallel.layout_check import undecided_dropouts
from threefold.parallel.leaf import as_stored, held, local, stored, stored_as, with_marks
from threefold.parallel.parameter import (
    Weight,
    draw_,
    initialise_,
    is_of_experts,
    longest_shard,
    make_weights,
    replace_parameters,
    set_in,
)
from threefold.parallel.pipeline.partition import StageMap, first_trained_stage, partitioned
from threefold.parallel.pipeline.schedules import DeferredGradients
from threefold.parallel.pipeline.stage import Stage, TiedWeights, whole_parameters
from threefold.parallel.recompute import apply_recompute, compile_layers, unwrapped
from threefold.parallel.shard_modules import float8_layers, shard_modules, standalone_cut, use_fp8
from threefold.parallel.zero import (
    ZeroSharding,
    make_zero_sharding,
    shard_parameters,
)
from threefold.random.dropout import Dropout
from threefold.random.rng import RandomStreams, give_streams
from threefold.torch_private.distributed import fresh_parameter


@dataclass(frozen=True)
class ChunkSizes:
    """Sizes of the chunks that work is divided into; they change memory and time, and results only by rounding.

    `threefold verify` makes them tiny, so that the small tensors of a shrunk model have several chunks.

    Attributes:
        norm_elements: number of adjacent elements whose squares are summed in the gradients' own dtype.
        logits_at_once: number of logits that the loss processes at once on a CPU.
        kept_logits_at_once: number of logits that the loss processes at once if it keeps all for the backward pass; 0
            for all of them, or on a CPU as many as `logits_at_once`.
    """

    bucket_bytes: int = BUCKET_BYTES
    norm_elements: int = NORM_ELEMENTS
    logits_at_once: int = LOGITS_AT_ONCE
    kept_logits_at_once: int = 0

    @classmethod
    def of_device(cls, device: str) -> "ChunkSizes":
        """Return the usual sizes on a kind of device, `cpu` or `cuda`."""
        return cls(kept_logits_at_once=LOGITS_OF_A_CHUNK if device == "cuda" else 0)


@dataclass(frozen=True)
class TrainingSettings:
    """Settings for how a model is distributed, stored and computed in training, as in a config unless listed.

    Apart from the seed, the dtypes and gradient compression, settings change no result, only memory and time.

    Attributes:
        micro_batches: number of parts in which a replica's samples of a step are computed, one after another (gradient
            accumulation); with a pipeline, the micro-batches of its schedule.
        micro_batch_size: samples of a part, where steps differ in their number; None if all have `micro_batches` parts,
            otherwise the most.
        parallel: how the model is distributed; the mesh has the sizes of its axes. `zero_shards` None is for all
            replicas, `stage_chunks` None for the schedule's default.
        arithmetic: how layers compute and sums are added up.
        is_custom: whether the model or the loss is not built in.
    """

    seed: int = 0
    micro_batches: int = 1
    micro_batch_size: int | None = None
    dtype: torch.dtype = torch.float32
    master_weights: bool = True
    fp8: bool = False
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: str = "none"
    recompute_every: int = 1
    compile: bool = False
    loss_chunk_size: int = 0
    chunks: ChunkSizes = field(default_factory=ChunkSizes)
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    is_custom: bool = False

    @classmethod
    def of(cls, config: Config, chunks: ChunkSizes | None = None) -> "TrainingSettings":
        """Return the settings of a resolved config, with chunks of the usual sizes of its device by default."""
        train, (micro_batches, micro_batch_size) = config.train, executed_micro_batches(config)
        return cls(
            seed=train.seed,
            micro_batches=micro_batches,
            micro_batch_size=micro_batch_size if len(entries_of(train.global_batch_size)) > 1 else None,
            dtype=DTYPES[config.precision.dtype],
            master_weights=config.precision.master_weights,
            fp8=config.precision.fp8,
            parallel=config.parallel,
            recompute=train.recompute,
            recompute_every=train.recompute_every,
            compile=train.compile,
            loss_chunk_size=train.loss_chunk_size,
            chunks=chunks or ChunkSizes.of_device(train.device),
            arithmetic=arithmetic_of(config),
            is_custom=(family := config.model.architecture) == CUSTOM or family not in FAMILIES.built_in,
        )

    def parts(self, samples: int) -> int:
        """Return the number of micro-batches of a step in which a replica has this many samples."""
        return self.micro_batches if self.micro_batch_size is None else samples // self.micro_batch_size

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype that weights are updated and gradients accumulated in."""
        return torch.promote_types(self.dtype, torch.float32) if self.master_weights else self.dtype


@dataclass(frozen=True)
class Parallelism:
    """Distribution of a model over a mesh, and the settings that it follows."""

    mesh: Mesh
    stages: StageMap
    settings: TrainingSettings = field(default_factory=TrainingSettings)
    zero: ZeroSharding | None = None
    deferred: DeferredGradients | None = None  # weight gradients that the schedule defers, if it defers any
    arithmetic: RankArithmetic = field(default_factory=RankArithmetic)

    @classmethod
    def make(cls, plan: ModelPlan, mesh: Mesh, settings: TrainingSettings) -> "Parallelism":
        """Return the parallelism of a model to train. Collective over the world; raises as `stage_map`."""
        if settings.arithmetic.is_bitwise and not mesh.in_tree:
            raise ValueError("the mesh of an exact run must sum in a tree; make it with Mesh(..., in_tree=True)")
        pp, parallel = mesh.pp.size, settings.parallel
        stages = StageMap((0, len(plan.layers)), (0,))
        if pp > 1:
            schedule = parallel.pipeline_schedule
            chunks = parallel.stage_chunks or schedule.default_stages_per_rank
            stages = partitioned(plan, pp, schedule, chunks, parallel.partition, parallel.zero)
        return cls(
            mesh,
            stages,
            settings,
            make_zero_sharding(mesh, parallel.zero, parallel.zero_shards or mesh.dp.size),
            DeferredGradients() if pp > 1 and parallel.pipeline_schedule.defers_weight_gradients else None,
            settings.arithmetic.on_rank(
                mesh, settings.micro_batches, parallel.sequence_parallel, settings.is_custom or plan.constructed
            ),
        )

    @property
    def context(self) -> ShardingContext:
        """Axes and settings that parallel layers are made with."""
        mesh = self.mesh
        return ShardingContext(mesh.tp, mesh.cp, mesh.ep, self.settings.parallel, arithmetic=self.arithmetic.layers)

    def context_for(self, plan: ModelPlan) -> ShardingContext:
        """Return `context` with the groups of tensor ranks that share a unit of the plan. Collective over the world."""
        tp = self.mesh.tp.size
        shares = sorted({tp // unit.count for unit in plan.units("tp").values() if unit.is_shared(tp)})
        of_shares = {count: self.mesh.tp_shares(count) for count in shares}
        return replace(self.context, tp_shares=of_shares, is_custom=plan.constructed)

    @property
    def sharding_axes(self) -> tuple[Axis, ...]:
        """Axes that may shard a parameter."""
        shards = () if self.zero is None else (self.zero.shards, self.zero.expert_shards)
        return (self.mesh.tp, self.mesh.ep, self.mesh.expert_replicas, *shards)


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
    """This rank's part of a model to train, with its weights at their initial values."""

    tied: TiedWeights
    streams: RandomStreams
    gradients: Gradients
    weights: list[Weight]
    copies: list[tuple[Tensor, Tensor]]
    """Leaves of tied weights, each with the leaf of another use on this rank, if gradients of uses are summed apart.
    Without ZeRO, both have the same memory."""
    names: tuple[str, ...]
    """Names in the unsplit model's `state_dict()`, in its order."""
    dropouts: dict[str, Dropout]
    """Dropout layers of a custom model on this rank, by name, whose parts a first batch shows."""
    first_trained: int
    """First pipeline stage with a trained weight."""

    @property
    def trained(self) -> list[Weight]:
        """Weights that are not frozen."""
        return [weight for weight in self.weights if weight.is_trained]


@overload
def apply_parallelism(
    make_model: Callable[[], nn.Module], plan: ModelPlan, how: Parallelism, *, trains: Literal[False]
) -> ParallelModel: ...


@overload
def apply_parallelism(make_model: Callable[[], nn.Module], plan: ModelPlan, how: Parallelism) -> TrainableModel: ...


def apply_parallelism(
    make_model: Callable[[], nn.Module],
    plan: ModelPlan,
    how: Parallelism,
    *,
    trains: bool = True,
) -> ParallelModel:
    """Build this rank's part of a model, to train or only to be used. Collective over the world.

    Raises a `UserError` if the plan does not fit the model.
    """
    settings, mesh = how.settings, how.mesh
    model = skeleton(make_model, settings.seed)
    call_hook("check_plan", model, plan)
    check_tensor_axis(plan, mesh.tp.size)
    call_hook("check_cuts", model, plan, mesh.tp.size, 0 if how.zero is None else how.zero.stage)
    names = tuple(name for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor))
    first_trained = first_trained_stage(dict(model.named_parameters()), plan, how.stages) if plan.frozen else 0
    in_float8 = float8_layers(model, plan) if trains and settings.fp8 else []
    # Pipeline parallelism: this rank's stages.
    numbers = how.stages.held_by(mesh.pp.index)
    stages = [Stage(model, plan, *how.stages.layers(number), how.arithmetic.passes) for number in numbers]
    separates = trains and how.arithmetic.separates_uses
    if trains:
        settings.arithmetic.check(model, plan, mesh.tp.size)
    if separates:
        _untie(stages)
    # Tensor, sequence, context and expert parallelism: parallel layers replace single-device ones.
    shard_modules(stages, plan.split, how.context_for(plan), plan.standalone, how.arithmetic.shardings)
    # Sharding made new parameters, so they are tied and frozen again.
    if not separates:
        for stage, name, _, first in _further_uses(stages):
            set_in(stage, name, first)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if plan.whole_name(name) in plan.frozen:
                parameter.requires_grad_(False)
    dropouts = {name: each for stage in stages for name, each in undecided_dropouts(stage, plan).items()}
    constructed = ConstructedModel(make_model, settings.seed)
    if not trains:
        _allocate(stages, how, constructed)
        for stage in stages:
            for parameter in stage.parameters():
                local(parameter)  # which layers compute with from now on
        return ParallelModel(stages, plan, how)
    tied = TiedWeights(plan, how.stages, mesh)
    # Activation checkpointing (recompute), with the random streams of modules inside; chunked losses.
    streams = RandomStreams(settings.seed, mesh.coordinates, mesh.device)
    give_streams(streams, nn.ModuleList(stages))
    for loss in (each for stage in stages for each in stage.modules() if isinstance(each, LinearCrossEntropy)):
        loss.chunk_size = 0 if how.arithmetic.keeps_whole_logits else settings.loss_chunk_size
        loss.at_once = 0 if how.arithmetic.keeps_whole_logits else settings.chunks.kept_logits_at_once
        compiled = settings.compile and mesh.device.type == "cuda"  # on a CPU, runs that fit the caches are faster
        loss.cross_entropy.logits_at_once = COMPILED if compiled else settings.chunks.logits_at_once
    use_fp8(stages, in_float8)
    apply_recompute(stages, settings.recompute, settings.recompute_every, streams, how.arithmetic.passes)
    if settings.compile:
        compile_layers(stages, how.deferred is not None, settings.fp8)
    # Data parallelism, or ZeRO.
    _allocate(stages, how, constructed)
    further = _further_uses(stages) if separates else []
    copies = [(local(stored(first)), local(stored(parameter))) for _, _, parameter, first in further]
    if how.zero is None:
        for leaf, copy in copies:
            copy.data = leaf.data
    gradients = _make_gradients(stages, how, copies)
    how.arithmetic.attach([unwrapped(each) for stage in stages for each in stage.modules()], gradients)
    weights = make_weights(whole_parameters(stages), settings.master_dtype)
    initialise_(weights, plan, settings.seed, gradients, constructed)
    return TrainableModel(stages, plan, how, tied, streams, gradients, weights, copies, names, dropouts, first_trained)


def _further_uses(stages: Sequence[Stage]) -> Iterator[tuple[Stage, str, nn.Parameter, nn.Parameter]]:
    """Yield each use of a tied weight after its first on this rank: stage, name, parameter, and the first use's."""
    kept: dict[str, nn.Parameter] = {}
    for stage in stages:
        for name, parameter in list(stage.named_parameters(remove_duplicate=False)):
            first = kept.setdefault(stage.model_plan.whole_name(name), parameter)
            if first is not parameter:
                yield stage, name, parameter, first


def _untie(stages: Sequence[Stage]) -> None:
    """Give each use of a tied weight its own parameter, as sharding does for the modules that it replaces."""
    for stage in stages:
        kept = set()
        for name, parameter in list(stage.named_parameters(remove_duplicate=False)):
            if parameter in kept:
                separate = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
                set_in(stage, name, with_marks(separate, parameter))
            kept.add(parameter)


def _allocate(stages: Sequence[Stage], how: Parallelism, constructed: ConstructedModel) -> None:
    """Allocate the parameters, values unset, and set the buffers to the constructor's values."""
    model = nn.ModuleList(stages)
    for stage in stages:
        for name, buffer in list(stage.named_buffers(remove_duplicate=False)):
            if stage.model_plan.initializes_buffer(name):
                value = torch.empty_like(buffer, device=how.mesh.device)
                set_in(stage, name, draw_(value, buffer, name, stage.model_plan, how.settings.seed))
            elif buffer.is_meta:  # of a constructed model, as `check_plan` has seen to
                dim = standalone_cut(stage.model_plan.standalone, name, how.mesh.tp)
                whole = constructed.buffer(name)
                value = whole if dim is None else local_part(whole, how.mesh.tp, dim).clone()
                dtype = how.settings.dtype if value.is_floating_point() else value.dtype
                set_in(stage, name, value.to(how.mesh.device, dtype))

    def allocated(parameter: nn.Parameter) -> nn.Parameter:
        # Contiguous, however its constructor made it: optimizer kernels and ZeRO rely on memory order.
        width = dtype if parameter.requires_grad else how.settings.dtype
        shard = made = torch.empty(held(parameter).shape, device=device, dtype=width)
        if isinstance(parameter, DTensor):  # computed with through its leaf, so never a `SPLIT_TENSOR`
            made = as_stored(shard, parameter.device_mesh, parameter.placements, parameter)
        if how.zero is not None or how.deferred is None or not parameter.requires_grad:
            return fresh_parameter(made, parameter.requires_grad)
        return stored_as(made, DeferrableWeight(shard, how.deferred))

    if how.zero is None:
        device, dtype = how.mesh.device, how.settings.dtype
        replace_parameters(model, allocated)
    else:
        # Sharded before allocation, trained ones in the width of the master weights.
        device, dtype = torch.device("meta"), how.settings.master_dtype
        replace_parameters(model, allocated)
        shard_parameters(stages, how.zero, how.mesh, how.settings.dtype, dtype)


def _make_gradients(
    stages: Sequence[Stage],
    how: Parallelism,
    copies: Sequence[tuple[Tensor, Tensor]],
) -> Gradients:
    """Make sharded gradients with ZeRO, else buckets; experts are summed over the replicas that hold them."""
    if how.zero is not None:
        return how.arithmetic.sharded_gradients(stages, how.zero, how.mesh.ep.size, copies)
    parameters = [parameter for _, parameter in whole_parameters(stages) if parameter.requires_grad]
    mesh, settings, dtype = how.mesh, how.settings, how.settings.master_dtype
    wire, bucket_bytes = DTYPES.get(settings.parallel.gradient_compression), settings.chunks.bucket_bytes
    longest = {local(parameter): longest_shard(parameter) for parameter in parameters}

    def buckets(leaves: list[Tensor], axis: Axis, senders: int = 1) -> GradientBuckets:
        return GradientBuckets(leaves, axis, dtype, bucket_bytes, wire, longest, mesh.tp, how.arithmetic.place(senders))

    experts = [local(parameter) for parameter in parameters if is_of_experts(parameter)]
    others = [local(parameter) for parameter in parameters if not is_of_experts(parameter)]
    for leaf, copy in copies:
        longest[copy] = longest[leaf]
        others.append(copy)
    everywhere = buckets(others, mesh.replicas)
    if not experts:
        return everywhere
    return JoinedGradients([(others, everywhere), (experts, buckets(experts, mesh.expert_replicas, mesh.ep.size))])

"""Explicit settings of a model's training and of its layout, as resolved from a config or given in code."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from threefold.comm.axis import Axis
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.config.schedules import Schedule, find_schedule
from threefold.constants import LOGITS_AT_ONCE
from threefold.dtypes import DTYPES
from threefold.models.sharding import ModelPlan
from threefold.parallel.context import ShardingContext
from threefold.parallel.gradients import BUCKET_BYTES
from threefold.parallel.pipeline.partition import StageMap, partitioned
from threefold.parallel.pipeline.stage import DeferredGradients
from threefold.parallel.zero import ZeroSharding, make_zero_sharding


@dataclass(frozen=True)
class PieceSizes:
    """Sizes of the pieces that work is divided into; they change memory and time, and results only by rounding.

    `threefold verify` makes them tiny, so that the small tensors of a shrunk model have several pieces too.

    Attributes:
        bucket_bytes: size at which a bucket of gradients is closed and the next one started.
        norm_elements: number of adjacent elements whose squares are summed in the gradients' own dtype.
        logits_at_once: number of logits that the loss goes over at once on a CPU.
    """

    bucket_bytes: int = BUCKET_BYTES
    norm_elements: int = 1 << 14
    logits_at_once: int = LOGITS_AT_ONCE


@dataclass(frozen=True)
class TrainingSettings:
    """How a model is spread, stored and computed in training.

    Apart from the seed, the dtypes and gradient compression, settings change no result, only memory and time.

    Attributes:
        seed: seed of initial weights, dropout and random streams.
        micro_batches: number of parts in which a replica's samples of a step are computed, one after another (gradient
            accumulation); with a pipeline, the micro-batches of its schedule.
        dtype: dtype of the computation.
        master_weights: whether parameters narrower than fp32 are updated, and their gradients accumulated, in fp32.
        zero: ZeRO stage, 0 to 3: the replicas shard optimizer state (1), gradients (2) and weights (3).
        zero_shards: number of replicas that share one copy if `zero` is not 0; None for all.
        gradient_compression: dtype that gradients are rounded to while they are summed: `none`, `fp16` or `bf16`.
        sequence_parallel: whether activations between parallel layers are sharded along the sequence over tp.
        cp_method: how context parallelism exchanges keys and values, `all-gather` or `ring`.
        schedule: pipeline schedule, by its name in `parallel.schedule` of a config, or the schedule itself.
        stage_chunks: number of pipeline stages per rank; None for the schedule's default.
        partition: partition of the layers into stages, as `parallel.partition` of a config.
        recompute: activation checkpointing: a key of the plan's `recompute`, or `none`.
        recompute_every: treat only every n-th of the layers that have modules to recompute.
        compile: whether layers run through `torch.compile`.
        loss_chunk_size: number of vocabulary entries whose logits are in memory at once; 0 for all.
        pieces: sizes that work is divided by.
    """

    seed: int = 0
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32
    master_weights: bool = True
    zero: int = 0
    zero_shards: int | None = None
    gradient_compression: str = "none"
    sequence_parallel: bool = False
    cp_method: str = "all-gather"
    schedule: str | Schedule = "1f1b"
    stage_chunks: int | None = None
    partition: str | tuple[int, ...] = "cost"
    recompute: str = "none"
    recompute_every: int = 1
    compile: bool = False
    loss_chunk_size: int = 0
    pieces: PieceSizes = field(default_factory=PieceSizes)

    @classmethod
    def of(cls, config: Config, pieces: PieceSizes | None = None) -> "TrainingSettings":
        """Return the settings of a resolved config, with pieces of the usual sizes by default."""
        parallel, train = config.parallel, config.train
        return cls(
            seed=train.seed,
            micro_batches=train.gradient_accumulation_steps,
            dtype=DTYPES[config.precision.dtype],
            master_weights=config.precision.master_weights,
            zero=parallel.zero,
            zero_shards=parallel.zero_shards,
            gradient_compression=parallel.gradient_compression,
            sequence_parallel=parallel.sequence_parallel,
            cp_method=parallel.cp_method,
            schedule=parallel.pipeline_schedule if parallel.pp > 1 else parallel.schedule,
            stage_chunks=parallel.stage_chunks,
            partition=parallel.partition,
            recompute=train.recompute,
            recompute_every=train.recompute_every,
            compile=train.compile,
            loss_chunk_size=train.loss_chunk_size,
            pieces=pieces or PieceSizes(),
        )

    @cached_property
    def pipeline_schedule(self) -> Schedule:
        """Schedule that `schedule` names; a file is read once, when it is first used.

        Raises:
            UserError: the file cannot be read, or its actions break a rule.
            ValueError: there is no such schedule.
        """
        return self.schedule if isinstance(self.schedule, Schedule) else find_schedule(self.schedule)


@dataclass(frozen=True)
class Parallelism:
    """How a model is spread over a mesh. Attributes that are not listed are those of `TrainingSettings`.

    Attributes:
        mesh: mesh axes, and this rank's coordinates.
        stages: stages of the pipeline, with their layers and ranks.
        zero: sharding of the state over the replicas; None without ZeRO.
        deferred: store of the weight gradients that the schedule defers; None if it defers none.
    """

    mesh: Mesh
    stages: StageMap
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    zero: ZeroSharding | None = None
    cp_method: str = "all-gather"
    master_weights: bool = True
    deferred: DeferredGradients | None = None

    @classmethod
    def make(cls, plan: ModelPlan, mesh: Mesh, settings: TrainingSettings) -> "Parallelism":
        """Return the parallelism of a model to train. Collective over the world; raises as `stage_map`."""
        pp, chunks = mesh.pp.size, settings.stage_chunks
        stages = StageMap((0, len(plan.layers)), (0,))
        if pp > 1:
            schedule = settings.pipeline_schedule
            chunks = chunks or schedule.default_stages_per_rank
            stages = partitioned(plan, pp, schedule, chunks, settings.partition, settings.zero)
        return cls(
            mesh,
            stages,
            settings.sequence_parallel,
            settings.dtype,
            make_zero_sharding(mesh, settings.zero, settings.zero_shards or mesh.dp.size),
            settings.cp_method,
            settings.master_weights,
            DeferredGradients() if pp > 1 and settings.pipeline_schedule.defers_weight_gradients else None,
        )

    @property
    def context(self) -> ShardingContext:
        """Axes and settings that parallel layers are made with."""
        return ShardingContext(self.mesh.tp, self.mesh.cp, self.mesh.ep, self.sequence_parallel, self.cp_method)

    def context_for(self, plan: ModelPlan) -> ShardingContext:
        """Return `context` with the groups of tensor ranks that share a unit of the plan. Collective over the world."""
        tp = self.mesh.tp.size
        shares = sorted({tp // unit.count for unit in plan.units("tp").values() if unit.is_shared(tp)})
        return replace(self.context, tp_shares={count: self.mesh.tp_shares(count) for count in shares})

    @property
    def sharding_axes(self) -> tuple[Axis, ...]:
        """Axes that may shard a parameter."""
        shards = () if self.zero is None else (self.zero.shards, self.zero.expert_shards)
        return (self.mesh.tp, self.mesh.ep, self.mesh.expert_replicas, *shards)

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype that weights are updated and gradients accumulated in."""
        return torch.promote_types(self.dtype, torch.float32) if self.master_weights else self.dtype

"""How a run's model is spread over a mesh: what `parallelize` and the pipeline need of the settings."""

from dataclasses import dataclass, replace

import torch

from threefold.comm.axis import Axis
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.models.sharding import ModelPlan
from threefold.parallel.context.sequence import ShardingContext
from threefold.parallel.data.zero import ZeroSharding, make_zero_sharding
from threefold.parallel.pipeline.deferred import DeferredGradients
from threefold.parallel.pipeline.placement import StageMap
from threefold.parallel.pipeline.stage_map import partitioned
from threefold.parallel.settings import TrainingSettings


@dataclass(frozen=True)
class Parallelism:
    """How a model is spread over a mesh.

    Attributes:
        mesh: its axes, and this rank's coordinates.
        stages: the pipeline's stages.
        sequence_parallel: whether activations between parallel layers are sharded along the sequence over tp.
        dtype: of the computation.
        zero: how ZeRO shards the state over the replicas; None without ZeRO.
        cp_method: how keys and values reach the queries of other context ranks, as in `parallel.cp_method`.
        master_weights: whether parameters narrower than fp32 are updated, and their gradients accumulated, in fp32.
        deferred: the store of weight gradients that the schedule defers; None where it defers none.
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
    def of(cls, config: Config, plan: ModelPlan, mesh: Mesh) -> "Parallelism":
        """That of a resolved config. Collective over the world.

        Raises:
            UserError: as `stage_map`.
        """
        return cls.make(plan, mesh, TrainingSettings.of(config))

    @classmethod
    def make(cls, plan: ModelPlan, mesh: Mesh, settings: TrainingSettings) -> "Parallelism":
        """That of a model that is trained. Collective over the world.

        Args:
            plan: the model's layers.
            mesh: of this rank.
            settings: how it is spread over the mesh.

        Raises:
            UserError: as `stage_map`.
        """
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
        """The axes and settings that parallel layers are made with."""
        return ShardingContext(self.mesh.tp, self.mesh.cp, self.mesh.ep, self.sequence_parallel, self.cp_method)

    def context_for(self, plan: ModelPlan) -> ShardingContext:
        """The same, with the groups of tensor ranks that share a unit of the plan. Collective over the world."""
        tp = self.mesh.tp.size
        shares = sorted({tp // unit.count for unit in plan.units("tp").values() if unit.is_shared(tp)})
        return replace(self.context, tp_shares={count: self.mesh.tp_shares(count) for count in shares})

    @property
    def sharding_axes(self) -> tuple[Axis, ...]:
        """The axes that may shard a parameter."""
        shards = () if self.zero is None else (self.zero.shards, self.zero.expert_shards)
        return (self.mesh.tp, self.mesh.ep, self.mesh.expert_replicas, *shards)

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype that weights are updated and gradients accumulated in."""
        return torch.promote_types(self.dtype, torch.float32) if self.master_weights else self.dtype

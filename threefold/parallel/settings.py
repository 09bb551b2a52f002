"""What the training of a model needs to know of a run, apart from the model and the layout: explicit settings."""

from dataclasses import dataclass, field
from functools import cached_property

import torch

from threefold.config import Config
from threefold.config.schedules import Schedule, find_schedule
from threefold.dtypes import DTYPES
from threefold.ops.sizes import LOGITS_AT_ONCE
from threefold.parallel.data.grad_buckets import BUCKET_BYTES


@dataclass(frozen=True)
class PieceSizes:
    """Sizes of the pieces that work is divided into: they change no result up to rounding, only memory and time.

    `threefold verify` makes them tiny, so that the small tensors of a shrunk model have several pieces too.

    Attributes:
        bucket_bytes: size from which a bucket of gradients is closed and the next started.
        norm_elements: neighbouring elements whose squares are added up in the gradients' own dtype.
        logits_at_once: logits that the loss goes over at once on a CPU.
    """

    bucket_bytes: int = BUCKET_BYTES
    norm_elements: int = 1 << 14
    logits_at_once: int = LOGITS_AT_ONCE


@dataclass(frozen=True)
class TrainingSettings:
    """How a model is spread, stored and computed with in training.

    All but `seed` and the dtypes change no result, only memory and time.

    Attributes:
        seed: of initial weights, dropout and random streams.
        micro_batches: how many parts a replica's samples of a step are computed in, one after another (gradient
            accumulation); with a pipeline, those that its schedule runs.
        dtype: of the computation.
        master_weights: whether parameters narrower than fp32 are updated, and their gradients accumulated, in fp32.
        zero: the ZeRO stage, 0 to 3: what the replicas share of optimizer state (1), gradients (2) and weights (3).
        zero_shards: replicas over which one copy is sharded where `zero` is not 0; None for all.
        gradient_compression: what gradients are rounded to while they are summed: `none`, `fp16` or `bf16`.
        sequence_parallel: whether activations between parallel layers are sharded along the sequence over tp.
        cp_method: how context parallelism exchanges keys and values, `all-gather` or `ring`.
        schedule: of the pipeline, by the name that `parallel.schedule` of a config has, or the schedule itself.
        stage_chunks: pipeline stages of each rank; None for what the schedule has by default.
        partition: of the layers into stages, as `parallel.partition` of a config.
        recompute: activation checkpointing, a key of the plan's `recompute`, or `none`.
        recompute_every: of the layers that recompute treats, every so many-th.
        compile: whether layers run through `torch.compile`.
        loss_chunk_size: entries of the vocabulary whose logits are in memory at once; 0 for all.
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
        """Those of a resolved config, with pieces of the usual sizes unless others are given."""
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
        """The schedule that `schedule` names; a file is read once, when it is first used.

        Raises:
            UserError: the file cannot be read or its actions break a rule.
            ValueError: there is no such schedule.
        """
        return self.schedule if isinstance(self.schedule, Schedule) else find_schedule(self.schedule)

"""Real ranks that measure what a dry run predicts."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from tests.support.parity import Case, make_engine
from threefold.planner.dry_step import Measured, batch_of, even_choice, measure_step
from threefold.torch_private.fake import TOP_K, OperationMode
from threefold.verify.worker_pool import WorkerPool


class EvenRouting(OperationMode):
    """Routers choose as those of a dry run do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return even_choice(out, *args) if func is TOP_K else out


def measure(case: Case) -> Measured:
    """What this rank of a real layout needs for its first step."""
    engine = make_engine(case)
    with EvenRouting() if case.config.model.num_experts else nullcontext():
        return measure_step(engine, batch_of(case.config, engine.mesh.dp.index))


def measured_ranks(pool: WorkerPool, case: Case) -> Iterator[list[Measured]]:
    """That of every rank of a layout, whose collectives go through the process group alone, as those of a dry run.

    Several times, as gloo's threads may free what they sent a moment after the operation has ended.
    """
    for _ in range(4):
        yield pool.run(case.world_size, measure, replace(case, shared_memory=False))

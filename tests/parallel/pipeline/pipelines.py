"""Pipelines for tests: layouts with several stages per rank, and schedules without ranks."""

from types import SimpleNamespace
from typing import Any

from tests.support.parity import Case
from threefold.config.schedules import SCHEDULES
from threefold.parallel.pipeline.schedules import training_schedule


def chunked(schedule: str, chunks: int = 2, **changes) -> Case:
    base = {"dtype": "fp64", "layers": 7, "dropout": 0.1, "steps": 2, "accumulation": 8}
    return Case(**base | {"schedule": schedule, "settings": (("parallel.stage_chunks", chunks),)} | changes)


def alone(schedule: str, pp: int, chunks: int, rank: int, micro_batches: int) -> Any:
    """Return the schedule of a rank, without any process."""
    ranks = SCHEDULES[schedule].stage_ranks(pp, chunks)
    pipes = [
        SimpleNamespace(num_stages=len(ranks), group_size=pp, group_rank=rank, submod=None, stage_index=number)
        for number, place in enumerate(ranks)
        if place == rank
    ]
    for pipe in pipes:
        pipe.is_last = pipe.stage_index == len(ranks) - 1
    return training_schedule(SCHEDULES[schedule], pipes, micro_batches, lambda *_: None)  # type: ignore[arg-type]

"""The memory of a step does not grow with its micro-batches, but for their tokens and losses."""

from dataclasses import replace

import pytest

from tests.planner.dry_run_support import measure
from tests.support.parity import Case
from tests.support.sweep import sweep
from threefold.planner.dry_run import dry_run
from threefold.verify.worker_pool import WorkerPool

SMALL = Case(pp=2, layers=2, heads=2, head_dim=4, ffn=16, vocab=8, sequence=16, tie=False, shared_memory=False)
TOKENS = 16 * (8 + 8)  # of a micro-batch, and their labels
PER_MICRO_BATCH = 24  # its number, its loss and its scaled loss
SCHEDULES = ("1f1b", "interleaved", "zbv")


def with_micro_batches(schedule: str, count: int) -> Case:
    layers = 2 if schedule == "1f1b" else 4
    return replace(SMALL, schedule=schedule, layers=layers, batch=count, accumulation=count)


def grows_by_numbers_alone(few: int, many: int, micro_batches: int) -> bool:
    return 0 <= many - few - micro_batches * TOKENS <= micro_batches * PER_MICRO_BATCH


@sweep("schedule", SCHEDULES, slow=slice(0, None, 2))
def test_a_dry_run_needs_no_more_with_more_micro_batches(schedule: str) -> None:
    """With the larger number, receive buffers for all at once would be more than all else."""
    few, many = 8, 72
    peaks = [dry_run(with_micro_batches(schedule, count).config, rank=1).peak_bytes for count in (few, many)]
    assert grows_by_numbers_alone(*peaks, many - few)


@sweep(
    ("schedule", "shared_memory"),
    [("zbv", False), ("zbv", True), ("1f1b", True), ("interleaved", False), ("interleaved", True)],
    quick=(0,),
)
def test_a_real_rank_needs_no_more_with_more_micro_batches(
    pool: WorkerPool, schedule: str, shared_memory: bool
) -> None:
    """Of what was sent, only the last few are kept: several times, as gloo's threads free it when they come to it."""
    few, many = 10, 40
    for _ in range(4):
        cases = [replace(with_micro_batches(schedule, count), shared_memory=shared_memory) for count in (few, many)]
        runs = [pool.run(2, measure, case) for case in cases]
        peaks = [[sum(rank.peak.values()) for rank in ranks] for ranks in runs]
        if all(grows_by_numbers_alone(*each, many - few) for each in zip(*peaks, strict=True)):
            return
    pytest.fail(f"{peaks}")

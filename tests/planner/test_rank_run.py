"""A dry run of a rank against the same rank of a real run: bytes, collectives, operations, the allocator, errors."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.planner.golden_collectives import LAYOUTS, first_difference, names_of, read
from tests.support.parity import Case, make_engine
from tests.support.sweep import sweep
from threefold.config import Config, resolve
from threefold.data.loader import Batch
from threefold.errors import UserError
from threefold.models.layers.attention import CausalAttention
from threefold.models.layers.decoder import SampleInfo
from threefold.planner import dry_run as rank_run
from threefold.planner.dry_run import dry_run, run_step
from threefold.planner.dry_step import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    DryRunReport,
    FlopCount,
    Measured,
    Observer,
    batch_of,
    even_choice,
    measure_step,
)
from threefold.torch_private.fake import TOP_K, FakeTensor, OperationMode, fake_tensors
from threefold.train.step import Engine
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


NEAR = 0.01


LARGE = [name for name, case in LAYOUTS.items() if case.world_size > 4]
SMALL = [name for name in LAYOUTS if name not in LARGE]


@pytest.mark.sweep
@pytest.mark.parametrize("name", LARGE)
def test_memory_and_collectives_of_eight_ranks(pool: WorkerPool, name: str) -> None:
    compare(pool, name)


@sweep("name", SMALL, quick=(8,), slow=slice(0, None, 3))
def test_memory_and_collectives_are_those_of_a_real_rank(pool: WorkerPool, name: str) -> None:
    compare(pool, name)


def compare(pool: WorkerPool, name: str) -> None:
    """The first rank and the last."""
    case = LAYOUTS[name]
    ranks = list(dict.fromkeys((0, case.world_size - 1)))
    runs = [run_step(case.config, rank) for rank in ranks]
    assert not dist.is_initialized()
    for measured in measured_ranks(pool, case):
        for rank, (report, events) in zip(ranks, runs, strict=True):
            real = measured[rank]
            held = (report.parameter_bytes, report.gradient_bytes, report.optimizer_bytes)
            assert held == tuple(real.held[kind] for kind in (WEIGHTS, GRADIENTS, OPTIMIZER))
            assert first_difference([names_of(events)], [names_of(real.events)]) is None
            if not case.config.model.num_experts:  # whose bytes follow from the routing
                assert first_difference([names_of(events)], [read()[name][rank]]) is None
        if all(is_near(report, measured[rank]) for rank, (report, _) in zip(ranks, runs, strict=True)):
            return
    pytest.fail(f"{name}: {[(report.at_peak, measured[report.rank].peak) for report, _ in runs]}")


def is_near(report: DryRunReport, real: Measured) -> bool:
    """Within one percent, of the whole and of the activations alone."""
    whole, activations = sum(real.peak.values()), real.peak[ACTIVATIONS]
    return abs(report.peak_bytes - whole) <= NEAR * whole and abs(report.activation_bytes - activations) <= (
        NEAR * activations
    )


def small(**sections: dict[str, object]) -> Config:
    given = {
        "model": {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32},
        "data": {"path": "nowhere", "sequence_length": 8},
        **sections,
    }
    return resolve(Config.model_validate(given), 1)


def test_flops_of_a_step_are_those_of_its_products() -> None:
    """Six for each weight of a matrix product and each token; attention's beside."""
    config = small(train={"global_batch_size": 4})
    tokens, hidden, vocab = 4 * 8, 16, 32
    products = 2 * 12 * hidden**2 + hidden * vocab
    scores = 2 * 2 * tokens * 8 * hidden  # two products a layer, of all pairs of positions
    assert dry_run(config).flops == 6 * tokens * products + 2 * (scores + scores * 5 // 2)


@sweep("name", ("tp2", "dp2 pp2, ZeRO 3", "mixture, ep2"), quick=(1,))
def test_no_number_has_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    seen: list[bool] = []

    def checked(engine: Engine, batch: Batch, observer: Observer | None = None) -> Measured:
        of_weights = [each for weight in engine.model.weights for each in (weight.leaf, weight.master)]
        numbers = [*of_weights, *(state for *_, state in engine.optimizer.states())]
        seen.extend(isinstance(each, FakeTensor) for each in numbers)
        return measure_step(engine, batch, observer)

    monkeypatch.setattr(rank_run.dry_step, "measure_step", checked)
    dry_run(LAYOUTS[name].config)
    assert len(seen) > 100
    assert all(seen)


def test_recomputation_is_counted() -> None:
    plain, full = (dry_run(small(train={"global_batch_size": 4, "recompute": mode})) for mode in ("none", "full"))
    assert full.flops > 1.2 * plain.flops
    assert full.activation_bytes < plain.activation_bytes


def test_a_world_of_thousands_of_ranks_takes_one_process() -> None:
    config = small(parallel={"dp": 2048, "tp": 2, "pp": 2}, train={"global_batch_size": 4096})
    report = dry_run(config, 8191)
    assert (report.world_size, dict(report.coordinates)) == (8192, {"dp": 2047, "pp": 1, "cp": 0, "tp": 1})
    assert report.parameters == dry_run(replace_dp(config, 2), 3).parameters


def replace_dp(config: Config, dp: int) -> Config:
    parallel = config.parallel.model_copy(update={"dp": dp})
    train = config.train.model_copy(update={"global_batch_size": 2 * dp})
    return config.model_copy(update={"parallel": parallel, "train": train})


def test_a_rank_that_does_not_exist_is_one_sentence() -> None:
    config = Case(dp=2).config
    with pytest.raises(UserError, match=r"^rank is 2 but the layout dp 2 · tp 1 · pp 1 has ranks 0 to 1; use 1\.$"):
        dry_run(config, 2)
    with pytest.raises(UserError, match=r"rank is -1 .* use 0\.$"):
        dry_run(config, -1)


def test_no_process_group_is_left_or_taken_over(tmp_path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        with pytest.raises(RuntimeError, match="has another"):
            dry_run(replace(Case(), layers=1).config)
    finally:
        dist.destroy_process_group()


TINY = Case(pp=2, layers=2, heads=2, head_dim=4, ffn=16, vocab=8, sequence=16, tie=False, shared_memory=False)
TOKENS = 16 * (8 + 8)  # of a micro-batch, and their labels
PER_MICRO_BATCH = 24  # its number, its loss and its scaled loss
SCHEDULES = ("1f1b", "interleaved", "zbv")


def with_micro_batches(schedule: str, count: int) -> Case:
    layers = 2 if schedule == "1f1b" else 4
    return replace(TINY, schedule=schedule, layers=layers, batch=count, accumulation=count)


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


BASE = Case(layers=3, heads=4, head_dim=16, ffn=256, vocab=256, sequence=64, batch=8, tie=False)
CASES = {
    "fp32": BASE,
    "bf16": replace(BASE, dtype="bf16"),
    "dp2, ZeRO 2": replace(BASE, dp=2, settings=(("parallel.zero", 2),)),
    "dp2, ZeRO 3": replace(BASE, dp=2, settings=(("parallel.zero", 3),)),
    "tp2": replace(BASE, tp=2),
    "tp2, sp": replace(BASE, tp=2, settings=(("parallel.sequence_parallel", True),)),
    "cp2": replace(BASE, cp=2),
    "recompute": replace(BASE, settings=(("train.recompute", "full"),)),
    "pp2": replace(BASE, pp=2, accumulation=4),
}


def most_allocated(case: Case) -> int:
    """Bytes that a step allocates at most beside what is there before: the median of three first steps, as the
    profiler's clock, by which its events are ordered, may step where a virtual machine moves the process to another
    core."""
    return int(median(most_of_a_step(case) for _ in range(3)))


def most_of_a_step(case: Case) -> int:
    engine = make_engine(case)
    batch = batch_of(case.config, engine.mesh.dp.index)
    gc.collect()  # what an earlier engine left, whose end the profiler would count
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine.train_step(batch, 0)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes))


@sweep("name", CASES, quick=(0,))
def test_the_allocator_gives_what_a_dry_run_says(pool: WorkerPool, name: str) -> None:
    """Of what is not there before the step: to the percent of the whole. Through shared memory: gloo's threads free
    what they have sent when they come to it."""
    case = CASES[name]
    report = dry_run(case.config)
    tokens = 8 // case.dp * 64 * (8 + 8)  # of the batch, which is there before, and counted in the dry run
    found = report.activation_bytes - tokens
    given = pool.run(case.world_size, most_allocated, case)[0]
    assert abs(given - found) <= 0.01 * report.peak_bytes, (given, found)


class Counting(OperationMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = FlopCount()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count(func, args, kwargs or {}, out)
        return out


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("documents", [False, True])
def test_attention_in_a_window(documents: bool, dropout: float) -> None:
    """Tiles of 256 queries, the first of 256 keys, the others of 511: 7 products of 2 · 4 · 8 operations a pair."""
    core = CausalAttention(dropout, 256, "core")
    with fake_tensors(), Counting() as mode:
        q, k, v = (torch.empty(2, 4096, heads, 8, requires_grad=True) for heads in (4, 1, 1))
        of_rows = torch.zeros(2, 4096, dtype=torch.int64) if documents else None
        core(q, k, v, SampleInfo(torch.zeros(2, dtype=torch.int64), of_rows)).sum().backward()
    pairs = 256 * 256 + 15 * 256 * 511
    assert mode.count.total == 7 * 2 * 2 * 4 * 8 * pairs

"""What a run tells of its hardware: FLOP/s and MFU by the formula, the rank that takes most memory, the time waited."""

import json
from pathlib import Path

import pytest

from tests.train.support import Run, record, train_rank
from threefold.comm.heartbeat import wait_code
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.planner.block import model_flops_per_token
from threefold.planner.performance import PerformanceMeter
from threefold.report.console import Summary
from threefold.report.tensorboard import step_values
from threefold.resilience.heartbeat import PAGE_BYTES, PageHeartbeat
from threefold.resilience.rank_state import read
from threefold.train.callbacks.base import RunContext
from threefold.train.callbacks.records import MeanRates, Performance
from threefold.train.callbacks.step_log import step_line
from threefold.verify.worker_pool import WorkerPool

USED = Performance(2e12, 0.25, 3_000_000_000, 5_000_000_000, 6, 0.125, 61.25)


def meter_of(run: Run, heartbeat: PageHeartbeat, ranks: int, peak: float | None) -> PerformanceMeter:
    mesh = Mesh.alone()
    mesh.layout, mesh.heartbeat = Layout(dp=ranks), heartbeat
    return PerformanceMeter(RunContext(run.config, Path(), mesh, peak_rate=peak))


def test_rates_are_the_model_flops_over_time_and_ranks(small_run: Run) -> None:
    meter = meter_of(small_run, PageHeartbeat(), 4, 1e6)
    meter.before_step()
    found, config = meter.after_step(1, 0.5), small_run.config
    length = config.data.sequence_length
    flops = model_flops_per_token(config.model, length)
    assert flops is not None
    assert found.flops_per_second == pytest.approx(flops * length * config.train.global_batch_size / 4 / 0.5)
    assert found.mfu == pytest.approx(found.flops_per_second / 1e6)
    assert meter_of(small_run, PageHeartbeat(), 4, None).after_step(1, 0.5).mfu is None


def test_the_rank_that_takes_most_memory_and_the_time_waited(small_run: Run) -> None:
    pages = [memoryview(bytearray(PAGE_BYTES)) for _ in range(3)]
    PageHeartbeat(pages[2]).memory(1 << 50)
    heartbeat = PageHeartbeat(pages[0], lambda: [read(page) for page in pages])
    meter = meter_of(small_run, heartbeat, 3, None)
    before = heartbeat.waited
    with heartbeat.waiting(wait_code("barrier", 0)):
        pass
    outside = heartbeat.waited - before
    meter.before_step()
    with heartbeat.waiting(wait_code("barrier", 0)):
        pass
    found = meter.after_step(1, 1.0)
    assert (found.largest_memory, found.largest_rank) == (1 << 50, 2)
    assert 0 < read(pages[0]).memory == found.memory < 1 << 50
    assert found.waited == pytest.approx(heartbeat.waited - before - outside)


def test_means_weigh_steps_by_their_time() -> None:
    rates = MeanRates()
    rates.add(1.0, USED)
    rates.add(3.0, Performance(4e12, 0.5, 1, 1, 0, 0.0, 0.0))
    rates.add(5.0, None)
    assert rates.teraflops == pytest.approx((2 + 3 * 4) / 4)
    assert rates.mfu == pytest.approx(rates.teraflops / 8)


def test_the_step_log_and_the_summary() -> None:
    phases = {"data": 0.05344, "callbacks": 0.0, "forward_backward": 1.5, "update": 0.5}
    steps = [record(1, performance=USED, phases=phases), record(2, performance=USED, phases=phases)]
    assert step_line(steps, ranks=8).endswith(
        ", learning rate: 5.55556e-09, tflops: 2, mfu: 25.0%, memory: 3.0 GB, max_memory: 5.0 GB (rank 6), "
        "avg_forward_backward_cost: 1.50000 sec, avg_update_cost: 0.50000 sec, avg_wait_cost: 0.12500 sec, "
        "wall_clock: 61.2 sec"
    )
    summary = Summary({})
    for step in steps:
        summary.after_step(step)
    rows = dict(summary.rows())
    assert rows["compute"] == "2.0 model TFLOP/s a rank, 25.0% of the peak rate (MFU)"
    assert rows["memory"] == "5.0 GB on rank 6, which takes most"
    assert {"seconds/update": 0.5, "tflops": 2.0, "mfu": 0.25}.items() <= step_values(steps[0]).items()


def test_a_run_writes_them(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    pool.run(2, train_rank, small_run.but(dp=2, steps=2), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    step = next(line for line in lines if line.get("loss") and line["step"] == 2)
    assert sum(step["phases"].values()) == pytest.approx(step["seconds"], abs=1e-5)
    assert step["tflops"] > 0
    assert step["largest_memory"] >= step["memory"] > 1 << 20
    assert 0 <= step["waited"] <= step["seconds"] < step["wall_clock"]
    log = (tmp_path / "train.log").read_text()
    assert "tflops: " in log
    assert "avg_wait_cost: " in log
    events = next((tmp_path / "tensorboard").iterdir()).read_bytes()
    assert all(tag in events for tag in (b"tflops", b"memory", b"seconds/forward_backward", b"seconds/wall_clock"))

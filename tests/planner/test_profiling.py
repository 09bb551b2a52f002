"""Profiled runs: the same bits as without, a trace of each rank, spans of actions and phases, and the timeline."""

import contextlib
import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.support import Run, losses_of, train, train_rank
from threefold.comm.heartbeat import Activity, RunSection, wait_code
from threefold.planner.dry_run import dry_run
from threefold.planner.pictures import draw_run_timeline, measured_steps
from threefold.planner.profiling import ObservedHeartbeat, SpanRecorder, StepProfiler
from threefold.planner.stage_memory import stage_memory
from threefold.resilience.heartbeat import PAGE_BYTES, PageHeartbeat, Wait
from threefold.resilience.rank_state import WatchedHeartbeat, read
from threefold.verify.worker_pool import WorkerPool


def profile_rank(run: Run, run_dir: Path, steps: int, draws: bool = True) -> str:
    printed = io.StringIO()
    profiler = StepProfiler(steps, draw_run_timeline if draws else refuse)
    with contextlib.redirect_stdout(printed):
        train(run.config, run_dir, False, profiler=profiler)
    return printed.getvalue()


def refuse(path: Path, model: str) -> list[Path]:
    raise OSError(28, "No space left on device")


@pytest.mark.slow
def test_a_pipeline(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run = small_run.but(pp=2, tp=2, steps=5, set=(("train.micro_batch_size", 2),))
    pool.run(4, train_rank, run, tmp_path / "plain")
    first, *others = pool.run(4, profile_rank, run, tmp_path / "run", 2)
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "plain")
    folder = tmp_path / "run" / "profile"
    assert f"Profile of steps 3 to 4: traces of all ranks, for https://ui.perfetto.dev, in {folder}; timeline" in first
    assert others == ["", "", ""]
    for rank in range(4):
        trace = json.loads((folder / f"rank-{rank:04}.json").read_text())
        names = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
        stage = rank // 2
        assert {f"{stage}{kind}{number}" for kind in "FB" for number in range(4)} <= names
        assert {
            "step 3",
            "step 4",
            "data",
            "update",
            "all_reduce over tp",
            "send over pp",
            "callback DataCheck",
        } <= names
        assert not any(name.startswith(f"{1 - stage}F") for name in names)
    found = json.loads((folder / "spans.json").read_text())
    assert [rank["pp_rank"] for rank in found["ranks"]] == [0, 1]
    steps = measured_steps(found["ranks"])
    assert [step.number for step in steps] == [3, 4]
    assert all(0 < step.bubble < 1 for step in steps)
    assert (folder / "timeline.png").stat().st_size > 10_000
    drawn = (folder / "timeline.svg").read_text()
    assert drawn.startswith("<?xml")
    assert f"{run.config.model.title} in dp 1 · tp 2 · pp 2: step " in drawn


MEASURED: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "dp2 ZeRO 2": (2, {"dp": 2, "set": (("parallel.zero", 2),)}),
    "dp2 ZeRO 3 bf16": (2, {"dp": 2, "set": (("parallel.zero", 3), ("precision.dtype", "bf16"))}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2, "set": (("train.micro_batch_size", 2),)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MEASURED)
def test_memory_of_a_step_is_that_of_a_dry_run(pool: WorkerPool, small_run: Run, tmp_path: Path, case: str) -> None:
    """In the step before the profiled ones; the dry run has no memory, and counts each tensor that the step makes."""
    ranks, changes = MEASURED[case]
    run = small_run.but(steps=3, **changes)
    first, *_ = pool.run(ranks, profile_rank, run, tmp_path / "run", 1)
    pool.run(ranks, train_rank, run, tmp_path / "plain")
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "plain")
    folder = tmp_path / "run" / "profile"
    assert f"Memory of step 2 at its peak, of the first rank of each stage; picture in {folder / 'memory.png'}" in first
    assert (folder / "memory.png").stat().st_size > 10_000
    found = json.loads((folder / "memory.json").read_text())
    assert (found["step"], found["unit"], found["device"]) == (2, "bytes", "cpu")
    estimated = [stage.by_dry_run for stage in stage_memory(run.config, "cpu")]
    assert [rank["estimate"] for rank in found["ranks"]] == estimated
    for number, rank in enumerate(found["ranks"]):
        causes = dry_run(run.config, number * ranks // len(found["ranks"])).causes
        moments = [dict(moment) for moment in rank["moments"]]
        largest = max(moments, key=lambda moment: sum(value for cause, value in moment.items() if cause != "at"))
        assert largest == rank["peak"]
        assert {"update", "gradient sum"} <= {moment["at"] for moment in moments}
        assert largest.pop("at")[1] in "FB"  # of a micro-batch
        assert largest == pytest.approx(causes, rel=0.02, abs=6000)  # tensor ranks sum in memory that they share


def test_one_process_whose_run_is_shorter_than_the_warm_up(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    (printed,) = pool.run(1, profile_rank, small_run.but(steps=2), tmp_path, 3, False)
    assert "spans.json cannot be written (No space left on device)." in printed  # which ends no run
    assert len(losses_of(tmp_path)) == 2
    (rank,) = json.loads((tmp_path / "profile" / "spans.json").read_text())["ranks"]
    assert {span["step"] for span in rank["spans"] if span["kind"]} == {1, 2}


def spans_of(stage: int, *actions: tuple[str, int, float, float]) -> dict[str, object]:
    """A rank of step 7, with an update after its actions."""
    named = [
        {
            "name": f"{stage}{kind}{number}",
            "kind": kind,
            "stage": stage,
            "micro_batch": number,
            "start": start,
            "end": end,
        }
        for kind, number, start, end in actions
    ]
    end = max(end for *_, end in actions)
    update = {"name": "update", "kind": "", "stage": 0, "micro_batch": 0, "start": end, "end": end + 1.0}
    return {"pp_rank": stage, "spans": [{**span, "step": 7} for span in [*named, update]]}


def test_the_measured_bubble_is_that_of_the_longest_stage() -> None:
    first = spans_of(0, ("F", 0, 10.0, 11.0), ("B", 0, 14.0, 16.0))  # 6 s, of which it works 3
    second = spans_of(1, ("F", 0, 11.0, 12.0), ("B", 0, 12.0, 14.0))  # 3 s, all of which it works
    (step,) = measured_steps([first, second])
    assert step.bubble == pytest.approx(((6 - 3) + (6 - 3)) / (2 * 6))
    assert step.seconds == pytest.approx(7.0)
    assert {span.kind for span in step.spans} == {"forward", "backward", "optimizer"}
    assert measured_steps([]) == []


def test_spans_of_a_step() -> None:
    recorder = SpanRecorder(torch.device("cpu"))
    heartbeat = ObservedHeartbeat(PageHeartbeat(), recorder)
    heartbeat.section(RunSection.STEP, 3)
    heartbeat.activity(Activity.FORWARD, 1, 0)  # before the recording
    recorder.start(3)
    heartbeat.section(RunSection.STEP, 4)
    heartbeat.activity(Activity.DATA)
    heartbeat.callback("Summary")
    heartbeat.activity(Activity.NOTHING)
    heartbeat.activity(Activity.FORWARD, 1, 7)
    with heartbeat.waiting(wait_code("all_reduce", heartbeat.axis("tp", (0, 1)))):
        pass
    heartbeat.activity(Activity.INPUT_GRADIENTS, 1, 7)
    heartbeat.activity(Activity.WEIGHT_GRADIENTS, 1, 7)
    heartbeat.activity(Activity.BACKWARD, 0, 2)
    heartbeat.activity(Activity.UPDATE)
    spans = recorder.stop()
    names = ["data", "callback Summary", "1F7", "1I7", "1W7", "0B2", "update"]
    assert [span.name for span in spans] == names
    assert [span.kind for span in spans] == ["", "", "F", "I", "W", "B", ""]
    assert {span.step for span in spans} == {4}
    assert all(before.end <= after.start for before, after in pairwise(spans))
    assert all(span.start <= span.end for span in spans)
    heartbeat.activity(Activity.FORWARD, 1, 8)
    assert recorder.stop() == []


def test_waits_are_ranges_of_the_trace_within_their_action() -> None:
    recorder = SpanRecorder(torch.device("cpu"))
    heartbeat = ObservedHeartbeat(PageHeartbeat(), recorder)
    code = wait_code("all_gather", heartbeat.axis("cp", (0, 1)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        recorder.start(0)
        heartbeat.activity(Activity.FORWARD, 0, 2)
        heartbeat.wait(code)
        with heartbeat.working():  # ends the wait and begins it again
            pass
        heartbeat.activity(Activity.UPDATE)  # ends it
        recorder.stop()
    times = {event.name: event.time_range for event in profiled.events()}
    assert set(times) >= {"0F2", "all_gather over cp", "update"}
    assert (
        times["0F2"].start <= times["all_gather over cp"].start <= times["all_gather over cp"].end <= times["0F2"].end
    )
    assert times["0F2"].end <= times["update"].start


def test_the_page_is_that_of_the_heartbeat_it_stands_for() -> None:
    page = memoryview(bytearray(PAGE_BYTES))
    first = WatchedHeartbeat(page)
    first.identify("this process")
    world = first.axis("world", (0, 1, 2))
    heartbeat = ObservedHeartbeat(first, SpanRecorder(torch.device("cpu")))
    assert heartbeat.axis("dp", (0, 2)) == world + 1
    heartbeat.section(RunSection.STEP, 5)
    heartbeat.wait(wait_code("barrier", world + 1))
    place = read(page)
    assert (place.step, place.wait, place.process) == (5, Wait("barrier", "dp", (0, 2)), "this process")

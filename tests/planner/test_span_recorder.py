"""What a heartbeat tells its observer: spans of actions and phases, in the page of the heartbeat that it stands for."""

from itertools import pairwise

import torch

from threefold.comm.heartbeat import PAGE_BYTES, Activity, Heartbeat, RunSection, Wait, wait_code
from threefold.planner.profiling import ObservedHeartbeat, SpanRecorder
from threefold.resilience.rank_state import WatchedHeartbeat, read


def test_spans_of_a_step() -> None:
    recorder = SpanRecorder(torch.device("cpu"))
    heartbeat = ObservedHeartbeat(Heartbeat(), recorder)
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
    heartbeat = ObservedHeartbeat(Heartbeat(), recorder)
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

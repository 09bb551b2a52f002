"""The closed forms of pipelines against the simulator."""

import pytest

from threefold.planner.cost import pipeline_seconds
from threefold.planner.schedule import StageTimes, program_of, simulate

TIMES = {"equal": (1.0, 1.0, 1.0), "published": (18.522, 18.086, 9.337)}


def _both(
    schedule: str, pp: int, chunks: int, count: int, times: list[tuple[float, float, float]]
) -> tuple[float, float]:
    """Closed form and simulation; times of the stages of each rank together."""
    columns = list(zip(*times, strict=True))
    closed = pipeline_seconds(*columns, schedule, chunks, count).total
    program = program_of(schedule, pp, chunks, count)
    per_stage = [tuple(each / chunks for each in times[stage % pp]) for stage in range(pp * chunks)]
    return closed, simulate(program, StageTimes(*zip(*per_stage, strict=True)), 0.0).length


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3)])
def test_equal_stages_are_exact(schedule: str, chunks: int, times: tuple[float, float, float]) -> None:
    closed, simulated = _both(schedule, 4, chunks, 16, [times] * 4)
    assert closed == pytest.approx(simulated, rel=1e-9)


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.9, 1.0)])
@pytest.mark.parametrize(("schedule", "chunks"), [("zero-bubble", 2), ("zero-bubble", 4), ("zbv", 2)])
def test_deferred_weight_gradients_fill_the_bubble(
    schedule: str, chunks: int, times: tuple[float, float, float]
) -> None:
    program = program_of(schedule, 4, chunks, 24)
    stages = StageTimes(*((each / chunks,) * 4 * chunks for each in times))
    closed = pipeline_seconds(*([each] * 4 for each in times), schedule, chunks, 24).total
    assert closed == pytest.approx(simulate(program, stages, 0.0).length, rel=1e-9)
    assert closed < pipeline_seconds(*([each] * 4 for each in times), "interleaved", chunks, 24).total


@pytest.mark.parametrize("slow", [0, 1, 3])
def test_unequal_stages(slow: int) -> None:
    times = [(1.0, 1.0, 1.0)] * 4
    times[slow] = (1.2, 1.2, 1.2)
    closed, simulated = _both("1f1b", 4, 1, 32, times)
    assert closed == pytest.approx(simulated, rel=0.02)


def test_sends() -> None:
    stages = [1.0] * 4
    shown = pipeline_seconds(stages, stages, stages, "1f1b", 1, 8, send=0.1)
    assert shown.sends == pytest.approx(0.1 * (2 * 8 + 2 * 3))
    hidden = pipeline_seconds(stages, stages, stages, "interleaved", 2, 8, send=0.1, overlapped=True)
    assert hidden.sends == pytest.approx(0.1 * 2 * 3)
    assert pipeline_seconds([1.0], [1.0], [1.0], "1f1b", 1, 8, send=0.1).total == 24


@pytest.mark.parametrize(("chunks", "count"), [(1, 1), (1, 3), (4, 1), (4, 2), (4, 3), (4, 4)])
def test_with_fewer_micro_batches_than_ranks_each_waits_for_its_turn(chunks: int, count: int) -> None:
    closed, simulated = _both("1f1b" if chunks == 1 else "interleaved", 4, chunks, count, [TIMES["published"]] * 4)
    assert closed == pytest.approx(simulated, rel=1e-9)

"""The closed forms of pipelines against the simulator."""

import pytest

from threefold.config.schedules import SCHEDULES
from threefold.planner.cost import bubble_seconds, pipeline_seconds
from threefold.planner.schedule import StageTimes, program_of, simulate

TIMES = {"equal": (1.0, 1.0, 1.0), "published": (18.522, 18.086, 9.337)}


def _both(
    schedule: str, pp: int, chunks: int, count: int, times: list[tuple[float, float, float]]
) -> tuple[float, float]:
    """Closed form and simulation; times of the stages of each rank together."""
    columns = list(zip(*times, strict=True))
    closed = pipeline_seconds(*columns, schedule, chunks, count).total
    program = program_of(schedule, pp, chunks, count)
    ranks = SCHEDULES[schedule].stage_ranks(pp, chunks)
    per_stage = [tuple(each / chunks for each in times[rank]) for rank in ranks]
    return closed, simulate(program, StageTimes(*zip(*per_stage, strict=True)), 0.0).length


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3)])
def test_equal_stages_are_exact(schedule: str, chunks: int, times: tuple[float, float, float]) -> None:
    closed, simulated = _both(schedule, 4, chunks, 16, [times] * 4)
    assert closed == pytest.approx(simulated, rel=1e-9)


DEFERRING = (("zbv", 2), ("dualpipev", 2), ("zero-bubble", 1), ("zero-bubble", 2))
UNEQUAL = {2: 0.95, 3: 1.1, 4: 1.2, 5: 0.9, 6: 1.05, 7: 1.0, 8: 1.15}
"""Share of a rank's times in those of the others, for each number of ranks."""


@pytest.mark.parametrize("ranks", UNEQUAL)
@pytest.mark.parametrize("kind", [*TIMES, "unequal"])
def test_deferred_weight_gradients_are_simulated_whatever_the_number_of_micro_batches(ranks: int, kind: str) -> None:
    """Of few micro-batches, which a closed form estimated too low, and of more than the search simulates."""
    first = TIMES.get(kind, TIMES["published"])
    times = [tuple(UNEQUAL[ranks] * each for each in first) if kind == "unequal" else first, *[first] * (ranks - 1)]
    for schedule, chunks in DEFERRING:
        counts = (*range(1, 4 * ranks + 1), 12 * ranks, 12 * ranks + 1)
        for count in (each for each in counts if SCHEDULES[schedule].accepts(ranks, each)):
            found, simulated = _both(schedule, ranks, chunks, count, times)
            limit = 1e-9 if count <= 9 * ranks or kind != "unequal" else 0.003
            assert found == pytest.approx(simulated, rel=limit), (schedule, chunks, count)
            least = bubble_seconds(
                sum(map(sum, times)), max(map(sum, times)), sum(each[2] for each in times), schedule, chunks, count
            )
            assert count * max(map(sum, times)) + least <= simulated * (1 + 1e-9), (schedule, chunks, count)


def test_few_micro_batches_in_a_v() -> None:
    """With as many as ranks, the drain of the second stages is not filled; with 2 p - 1, (p - 1) F / 2 is left."""
    stages = [1.0] * 4
    assert pipeline_seconds(stages, stages, stages, "zbv", 2, 4).bubble == pytest.approx(3.0)
    assert pipeline_seconds(stages, stages, stages, "zbv", 2, 7).bubble == pytest.approx(1.5)


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

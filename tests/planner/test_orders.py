"""The actions that a plan has of a schedule are those that a run has, and ranks hold what its row says."""

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parallel.pipeline.pipelines import alone, chunked
from tests.support.parity import Case, make_engine, shard_of
from tests.support.sweep import sweep
from threefold.config.schedules import SCHEDULES, Action, TorchSchedule, find_schedule
from threefold.errors import UserError
from threefold.parallel.pipeline.runner import PipelineRunner
from threefold.parallel.pipeline.schedules import actions, orders_of_all_ranks
from threefold.planner.schedule import (
    ONLY_PLANNED,
    HeldPasses,
    find_planned,
    held_by_rank,
    orders_of,
    peak_micro_batches,
    program_of,
)

CANNOT = "The schedule {} cannot have {} micro-batches, as it"
CUSTOM = "0F1,0F0,0B1,0I0,0W0\n1F1,1B1,1F0,1I0,1W0\n"


def chunk_counts(schedule: str) -> tuple[int, ...]:
    stages = SCHEDULES[schedule].stages_per_rank
    return (stages,) if stages else (1, 2, 3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_orders_are_those_of_torchs_objects(schedule: str) -> None:
    checked = 0
    for pp in (1, 2, 3, 4):
        for chunks in chunk_counts(schedule):
            for count in (1, 2, 3, 4, 6, 8, 9, 13, 16):
                if SCHEDULES[schedule].accepts(pp, count):
                    expected = [tuple(actions(alone(schedule, pp, chunks, rank, count))) for rank in range(pp)]
                    assert orders_of(schedule, pp, chunks, count) == tuple(expected)
                    checked += 1
    assert checked >= 12


def what_runs(case: Case) -> tuple[list[Action], list[Action]]:
    """The actions of this rank in a real engine: planned, and done in a step."""
    engine = make_engine(case)
    assert isinstance(engine.runner, PipelineRunner)
    with engine.runner.timing() as log:
        engine.train_step(shard_of(case, 0, engine.mesh.dp.index), 0)
    return engine.runner.actions(), [each.action for each in log]


@sweep(
    ("schedule", "chunks", "pp", "count"),
    [
        ("1f1b", 1, 2, 1),
        ("1f1b", 1, 4, 8),
        ("gpipe", 1, 2, 4),
        ("interleaved", 2, 2, 4),
        ("interleaved", 3, 2, 8),
        ("looped-bfs", 2, 2, 4),
        ("zero-bubble", 1, 4, 8),
        ("zero-bubble", 2, 2, 4),
        ("zbv", 2, 2, 8),
        ("dualpipev", 2, 2, 4),
    ],
    quick=(0, 3, 8),
)
def test_orders_are_what_ranks_do(pool, schedule: str, chunks: int, pp: int, count: int) -> None:
    case = chunked(schedule, chunks, pp=pp, accumulation=count, batch=8, steps=1)
    ranks = pool.run(pp, what_runs, case)
    assert [planned for planned, _ in ranks] == [list(order) for order in orders_of(schedule, pp, chunks, count)]
    assert all(planned == done for planned, done in ranks)


@pytest.mark.parametrize("name", ["interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev"])
def test_what_is_written_here_is_what_torchs_classes_give(name: str) -> None:
    """At sizes where working out their sends takes long."""
    row = SCHEDULES[name]
    assert isinstance(row, TorchSchedule)
    for pp, count in ((5, 10), (6, 13), (7, 28), (16, 64)):
        if row.accepts(pp, count):
            assert orders_of(name, pp, 2, count) == orders_of_all_ranks(row, pp, 2, count)


def test_a_schedule_that_is_not_written_here_is_asked_of_torch() -> None:
    row = SCHEDULES["interleaved"]
    assert isinstance(row, TorchSchedule)
    assert orders_of(replace(row, name="new"), 3, 2, 6) == orders_of("interleaved", 3, 2, 6)


def test_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(CUSTOM)
    path = str(tmp_path / "own.csv")
    assert "\n".join(",".join(map(str, order)) for order in orders_of(path, 2, 1, 2)) + "\n" == CUSTOM


@pytest.mark.parametrize(("name", "hop"), [("zb-h1", 1), ("zb-h2", 2)])
@pytest.mark.parametrize(("pp", "count"), [(1, 2), (2, 1), (4, 3), (4, 8), (8, 24)])
def test_handwritten_zero_bubble_runs_as_a_csv_file(name: str, hop: int, pp: int, count: int, tmp_path: Path) -> None:
    orders = orders_of(name, pp, 1, count)
    (tmp_path / "zb.csv").write_text("\n".join(",".join(map(str, order)) for order in orders))
    file = find_schedule(str(tmp_path / "zb.csv"))  # complete, and no rank waits forever, or it is refused
    assert orders_of(file, pp, 1, count) == orders
    row = ONLY_PLANNED[name]
    held = [file.in_flight(pp, rank, 1) for rank in range(pp)]
    assert held == [min(count, row.in_flight(pp, rank, 1)) for rank in range(pp)]
    assert max(held) <= hop * pp  # Qi et al., table 1: as much as 1F1B, and twice as much


def test_zb_h1_is_what_zero_bubble_runs_with_one_stage_a_rank() -> None:
    assert orders_of("ZB-H1", 4, 1, 8) == orders_of("zero-bubble", 4, 1, 8)


def test_programs_are_kept() -> None:
    assert program_of("1f1b", 4, 1, 8) is program_of("Schedule1F1B", 4, 1, 8)


@pytest.mark.parametrize(
    ("name", "pp", "chunks", "count", "sentence"),
    [
        ("1f2b", 2, 1, 2, "The schedule '1f2b' must be the path of a .csv file of actions, or one of 1f1b, "),
        ("1f1b", 0, 1, 2, "The schedule 1f1b has 0 pipeline ranks but needs at least 1; use 1."),
        ("1f1b", 2, 1, -3, "The schedule 1f1b has -3 micro-batches but needs at least 1; use 1."),
        ("1f1b", 2, 2, 4, "The schedule 1f1b has 1 stage on each rank, not 2; use 1."),
        ("zbv", 2, 3, 4, "The schedule zbv has 2 stages on each rank, not 3; use 2."),
        (
            "interleaved",
            4,
            2,
            9,
            f"{CANNOT.format('interleaved', 9)} runs them in 2 equal rounds of at least parallel.pp 4; use 8.",
        ),
        (
            "dualpipev",
            4,
            2,
            5,
            f"{CANNOT.format('dualpipev', 5)} needs at least 2 for each of the 4 pipeline ranks; use 8.",
        ),
    ],
)
def test_what_a_schedule_is_not_for(name: str, pp: int, chunks: int, count: int, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        orders_of(name, pp, chunks, count)
    assert str(refused.value).startswith(sentence)


def test_a_file_for_other_numbers(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(CUSTOM)
    row = find_planned(str(tmp_path / "own.csv"))
    with pytest.raises(UserError, match=r"has a line for each of 2 ranks, not 3; use 2\."):
        orders_of(row, 3, 1, 2)
    with pytest.raises(UserError, match=r"cannot have 4 micro-batches, as it has actions for 2 micro-batches; use 2\."):
        orders_of(row, 2, 1, 4)


@pytest.mark.parametrize("name", [*SCHEDULES, *ONLY_PLANNED])
@pytest.mark.parametrize("pp", [2, 4])
def test_ranks_hold_at_most_what_the_row_of_the_schedule_says(name: str, pp: int) -> None:
    row, count = find_planned(name), 6 * pp
    chunks = row.default_stages_per_rank
    allowed = [row.in_flight(pp, rank, chunks) for rank in range(pp)]
    held = peak_micro_batches(orders_of(row, pp, chunks, count))
    assert all(found <= (count if most is None else most) for found, most in zip(held, allowed, strict=True))


def test_known_peaks() -> None:
    assert peak_micro_batches(orders_of("1f1b", 4, 1, 16)) == [4, 3, 2, 1]
    assert peak_micro_batches(orders_of("1f1b", 4, 1, 2)) == [2, 2, 2, 1]
    assert peak_micro_batches(orders_of("gpipe", 4, 1, 16)) == [16] * 4
    assert peak_micro_batches(orders_of("zb-h1", 4, 1, 16)) == [4] * 4
    assert peak_micro_batches(orders_of("zb-h2", 4, 1, 16)) == [7] * 4
    assert peak_micro_batches(orders_of("interleaved", 4, 2, 16)) == [5.5, 4.5, 3.5, 2.5]


def test_what_waits_for_weight_gradients_is_told_apart() -> None:
    held = [held_by_rank(order) for order in orders_of("zb-h1", 4, 1, 16)]
    assert held == [(4, 4, 1), (4, 3, 2), (4, 2, 3), (4, 1, 4)]
    assert held[0] == HeldPasses(until_weights=4, until_backward=4, deferred=1)
    assert held_by_rank(orders_of("1f1b", 4, 1, 16)[1]) == (3, 3, 0)


@pytest.mark.parametrize("name", ONLY_PLANNED)
def test_a_schedule_that_is_only_planned_can_be_copied_and_takes_any_number(name: str) -> None:
    row = ONLY_PLANNED[name]
    assert copy.deepcopy(row) is pickle.loads(pickle.dumps(row)) is row
    assert row.accepts(4, 1)
    assert row.micro_batch_rule(4, 1) == "takes any number of them"
    assert row.sends_apart, "runs use it as a file of actions"

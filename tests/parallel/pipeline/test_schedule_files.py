"""Schedules from outside the package, as CSV files of actions, and torch's own by the names of their classes: each
computes what one process computes, evaluates, resumes and passes `verify`."""

from pathlib import Path

import pytest

from tests.support.parity import Case, departures, in_layout, make_engine
from tests.support.sweep import sweep
from tests.train.support import Run, losses_of, steps_of, train_rank
from tests.verify.support import task, verify
from threefold.checkpoint.folder import newest, stored_config
from threefold.errors import UserError
from threefold.parallel.pipeline.runner import PipelineRunner
from threefold.planner.commands.simulate import write_schedule
from threefold.planner.custom_schedule import read_schedule_file
from threefold.planner.schedule import orders_of

OUT_OF_TURN = """\
0F1,0F0,0B1,0F3,0F2,0B0,0B3,0B2
1F1,1B1,1F0,1B0,1F3,1B3,1F2,1B2
"""
"""1F1B whose micro-batches come in another order."""

INTERLEAVED = """\
0F0,0F1,2F0,2F1,2I0,2B1,0I0,2W0,0B1,0W0
1F0,1F1,3F0,3B0,3F1,3B1,1B0,1I1,1W1
"""
"""Two stages a rank; some backward passes defer their weight gradients, some do not."""

FOLDED = """\
0F1,3F1,0F0,3I1,3F0,0I1,3B0,3W1,0W1,0B0
1F1,2F1,1F0,2F0,2B1,1B1,2B0,1B0
"""
"""The first and the last stage on one rank."""

UNEVEN = """\
1F0,1F1,1B0,1B1
0F0,0F1,2F0,2B0,2F1,2B1,0B0,0B1
"""
"""One stage on the first rank, the two around it on the other."""

FILES = {"out-of-turn": OUT_OF_TURN, "interleaved": INTERLEAVED, "folded": FOLDED, "uneven": UNEVEN}
MICRO_BATCHES = {"out-of-turn": 4}


@pytest.fixture(params=FILES, ids=str)
def schedule(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, int]:
    """The path of a file, and its number of micro-batches."""
    path = tmp_path / f"{request.param}.csv"
    path.write_text(FILES[request.param])
    return str(path), MICRO_BATCHES.get(request.param, 2)


def case_of(name: str, micro_batches: int) -> Case:
    return Case(dtype="fp64", layers=7, dropout=0.1, dp=2, pp=2, schedule=name, accumulation=micro_batches)


def test_a_file_trains_what_one_process_trains(pool, expected, schedule: tuple[str, int]) -> None:
    case = case_of(*schedule)
    found = departures(expected(case), pool.run(4, in_layout, case), case)
    assert not found, "\n".join(found[:10])


def test_zb_h2_as_the_planner_writes_it_trains_what_one_process_trains(pool, expected, tmp_path: Path) -> None:
    write_schedule(tmp_path / "h2.csv", orders_of("zb-h2", 4, 1, 8))
    case = Case(dtype="fp64", layers=7, dropout=0.1, pp=4, schedule=str(tmp_path / "h2.csv"), accumulation=8, batch=8)
    found = departures(expected(case), pool.run(4, in_layout, case), case)
    assert not found, "\n".join(found[:10])


def planned(case: Case) -> list[str]:
    engine = make_engine(case)
    assert isinstance(engine.runner, PipelineRunner)
    return [str(action) for action in engine.runner.actions()]


def test_a_rank_computes_the_actions_of_its_line(pool, schedule: tuple[str, int]) -> None:
    name, micro_batches = schedule
    case = Case(pp=2, layers=4, schedule=name, accumulation=micro_batches)
    assert pool.run(2, planned, case) == [[str(action) for action in order] for order in read_schedule_file(name)]


@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "loopedbfs", "ScheduleZBVZeroBubble", "1F1B"])
def test_a_class_of_torch_trains_what_one_process_trains(pool, expected, name: str) -> None:
    case = case_of(name, 4)
    found = departures(expected(case), pool.run(4, in_layout, case), case)
    assert not found, "\n".join(found[:10])


@sweep("schedule", [*FILES], slow=(0, 3), indirect=True)
def test_verify_finds_a_file_equal(pool, tmp_path: Path, schedule: tuple[str, int]) -> None:
    layout = f"dp2·pp2 schedule={schedule[0]}"
    (result,) = verify(pool, task(layout), tmp_path, layout)
    assert result.verdict == "equal", result.message
    assert str(result.spec) == f"dp2·pp2 schedule={schedule[0]}"


@pytest.mark.slow
def test_a_run_evaluates_and_resumes(pool, small_run: Run, tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text(INTERLEAVED)
    run = small_run.but(dtype="fp64", steps=4, set=(("train.eval_every", 2), ("train.eval_batches", 1)))
    own = run.but(dp=2, pp=2, set=(*run.set, ("parallel.schedule", str(file))))
    pool.run(1, train_rank, run.but(steps=6), tmp_path / "one")
    pool.run(4, train_rank, own, tmp_path / "own")
    pool.run(4, train_rank, own.but(steps=6), tmp_path / "own", True)
    assert losses_of(tmp_path / "own") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-12)
    assert steps_of(tmp_path / "own").keys() == steps_of(tmp_path / "one").keys()
    file.unlink()  # what was stored is of every layout, so it opens without it
    checkpoint = newest(tmp_path / "own")
    assert checkpoint is not None
    assert stored_config(checkpoint.path).model == run.config.model
    pool.run(1, train_rank, run.but(steps=7), tmp_path / "own", True)
    with pytest.raises(UserError, match=r"Cannot read the pipeline schedule .*own\.csv: No such file"):
        own.config  # noqa: B018

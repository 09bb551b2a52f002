"""Custom schedules, as CSV files and in Python: what follows from their actions, and every rule that they may break."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.planner.python_schedules import TOY
from threefold.checkpoint.code import require_named_code
from threefold.checkpoint.folder import FOLDER
from threefold.config import Config
from threefold.config.resolve import resolve
from threefold.config.schedules import SCHEDULES, Action, find_schedule
from threefold.errors import UserError
from threefold.planner.custom_schedule import CustomSchedule, read_schedule_file
from threefold.planner.schedule import orders_of

ONE_F_ONE_B = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def resolved(parallel: dict[str, Any], **train: Any) -> Config:
    given = {"data": {"path": "x"}, "parallel": parallel, "train": train, "model": {"num_layers": 8}}
    return resolve(Config.model_validate(given), 1000)


def write(folder: Path, text: str, name: str = "own.csv") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_schedule_travels_with_its_config(tmp_path: Path) -> None:
    for name in (*SCHEDULES, write(tmp_path, ONE_F_ONE_B)):
        config = resolved({"pp": 2, "schedule": name}, gradient_accumulation_steps=4 if name in SCHEDULES else 2)
        again = pickle.loads(pickle.dumps(config))
        assert again.parallel.pipeline_schedule.name == config.parallel.pipeline_schedule.name
    (tmp_path / "own.csv").unlink()
    assert again.parallel.pipeline_schedule.accepts(2, 2)  # read once, before there are workers


def test_facts_follow_from_a_file(tmp_path: Path) -> None:
    schedule = find_schedule(write(tmp_path, ONE_F_ONE_B))
    assert isinstance(schedule, CustomSchedule)
    assert (schedule.ranks, schedule.micro_batches, schedule.stages_per_rank) == (2, 2, 1)
    assert schedule.stage_ranks(2, 1) == (0, 1)
    assert [schedule.in_flight(2, rank, 1) for rank in (0, 1)] == [2, 1]
    assert not schedule.defers_weight_gradients
    assert schedule.one_backward_per_micro_batch
    assert [schedule.accepts(2, count) for count in (1, 2, 3)] == [False, True, False]
    config = resolved({"pp": 2, "schedule": schedule.name}, global_batch_size=6)
    assert (config.train.gradient_accumulation_steps, config.parallel.stage_chunks) == (2, 1)


def test_stages_may_lie_in_a_v_and_in_any_other_way(tmp_path: Path) -> None:
    v = find_schedule(write(tmp_path, "0F0,3F0,3I0,0I0,3W0,0W0\n1F0,2F0,2B0,1B0\n"))
    assert v.stage_ranks(2, 2) == (0, 1, 1, 0)
    assert v.defers_weight_gradients
    assert v.in_flight(2, 0, 2) == 1
    uneven = find_schedule(write(tmp_path, "1F0,1B0\n0F0,2F0,2B0,0B0\n"))
    assert uneven.stage_ranks(2, 2) == (1, 0, 1)
    assert uneven.stages_per_rank == 2
    assert [uneven.in_flight(2, rank, 2) for rank in (0, 1)] == [1, 1]


def test_the_format_is_that_of_torch(tmp_path: Path) -> None:
    """Empty fields are idle time in torch's table, and two actions in brackets are started together."""
    orders = read_schedule_file(
        write(tmp_path, '0F0,, 0F1 ,(0B0;0F2)OVERLAP_F_B,0B1,0B2,\n,1F0,1B0,1F1,1B1,1F2,"1B2"\n\n')
    )
    assert [str(action) for action in orders[0]] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    assert orders[1][-1] == Action(1, "B", 2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "The pipeline schedule own.csv is empty; write one line of actions for each rank."),
        ("0F0,0B0\n\n1F0,1B0\n", "parallel.schedule own.csv, line 2: it has no action, and each line is one pipeline rank; leave it out."),
        ("0F0,0X0\n", "parallel.schedule own.csv, line 1: '0X0' must be a stage, one of F, B, I and W, and a micro-batch, such as 0F2, the forward pass of micro-batch 2 on stage 0."),
        ("0F0,0SEND_F0\n", "parallel.schedule own.csv, line 1: '0SEND_F0' must be a stage, one of F, B, I and W, and a micro-batch, such as 0F2, the forward pass of micro-batch 2 on stage 0."),
        ("0F0,0B0\n0F1,0B1\n", "parallel.schedule own.csv, line 2: 0F1 cannot be here, as stage 0 has actions on line 1 already; put all of a stage on one line."),
        ("0F0,0B0\n1F0,1F0,1B0\n", "parallel.schedule own.csv, line 2: 1F0 is there twice; leave one of them out."),
        ("0F0,0B0\n1F0,1I0,1B0\n", "parallel.schedule own.csv, line 2: 1B0 computes again what 1I0 computes; leave one of them out."),
        ("0F0,0B0\n1F0,1B0,1W0\n", "parallel.schedule own.csv, line 2: 1W0 computes again what 1B0 computes; leave one of them out."),
        ("0F0,0B0\n2F0,2B0\n", "parallel.schedule own.csv has actions of 2 as its last stage but none of stage 1; number the stages from 0 without a gap."),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1B1\n", "parallel.schedule own.csv, line 2: 1F1 is missing, and each stage needs F and B (or I and W) of all 2 micro-batches; add it."),
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", "parallel.schedule own.csv, line 1: 0B1 is missing, and each stage needs F and B (or I and W) of all 2 micro-batches; add it."),
        ("0F0,0B0\n1F0,1I0\n", "parallel.schedule own.csv, line 2: 1W0 is missing, and each stage needs F and B (or I and W) of all 1 micro-batches; add it."),
        ("0F0,0B0\n1B0,1F0\n", "parallel.schedule own.csv, line 1: 0B0 can never run, as it needs 1B0, which comes later or waits for it; move 1B0 before it."),
        ("0F0,0B0\n1F0,1W0,1I0\n", "parallel.schedule own.csv, line 1: 0B0 can never run, as it needs 1I0, which comes later or waits for it; move 1I0 before it."),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "parallel.schedule own.csv, line 1: 0B0 can never run, as it needs 1B0, which comes later or waits for it; move 1B0 before it."),
    ],
)  # fmt: skip
def test_a_file_that_breaks_a_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, sentence: str) -> None:
    write(tmp_path, text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        resolved({"pp": 2, "schedule": "own.csv"})
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("parallel", "train", "sentence"),
    [
        ({"pp": 1}, {}, "parallel.schedule is own.csv but there is no pipeline where parallel.pp is 1; use 1f1b or parallel.pp 2."),
        ({"pp": 4}, {}, "parallel.pp is 4 but parallel.schedule own.csv has a line for each of 2 ranks; use 2."),
        ({"pp": 2, "stage_chunks": 3}, {}, "parallel.stage_chunks is 3 but parallel.schedule own.csv has 1 of them on each rank; use 1 or schedule interleaved."),
        ({"pp": 2}, {"gradient_accumulation_steps": 4}, "train.gradient_accumulation_steps is 4 but parallel.schedule own.csv has actions for 2 micro-batches; use 2."),
        ({"pp": 2}, {"global_batch_size": 5}, "train.gradient_accumulation_steps is 5 but parallel.schedule own.csv has actions for 2 micro-batches; use 2 with train.global_batch_size 2."),
        ({"pp": 2, "schedule": "other.csv"}, {}, "Cannot read the pipeline schedule other.csv: No such file or directory."),
    ],
)  # fmt: skip
def test_settings_that_a_file_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any], train: dict[str, int], sentence: str
) -> None:
    write(tmp_path, ONE_F_ONE_B)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        resolved({"schedule": "own.csv", **parallel}, **train)
    assert str(caught.value) == sentence


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(TOY)
    return "toy.py:looped"


def test_its_properties_follow_from_its_actions(toy: str) -> None:
    schedule = find_schedule(toy)
    assert (schedule.stages_per_rank, schedule.defers_weight_gradients) == (2, True)
    assert schedule.stage_ranks(3, 2) == (0, 1, 2, 0, 1, 2)
    assert [schedule.accepts(2, count) for count in (3, 4)] == [False, True]
    assert schedule.in_flight(2, 0, 2) is None
    config = resolved({"pp": 2, "schedule": toy}, global_batch_size=8)
    assert config.parallel.stage_chunks == 2
    again = pickle.loads(pickle.dumps(config)).parallel.pipeline_schedule
    assert again.name == toy
    assert [len(order) for order in orders_of(again, 4, 2, 6)] == [36] * 4


SENTENCES = {
    "looped": "train.gradient_accumulation_steps is 3 but parallel.schedule toy.py:looped does not support 3 of them on 2 ranks (an even number is needed); use 4 with train.global_batch_size 4.",
    "deadlocked": "parallel.schedule toy.py:deadlocked for 2 ranks and 8 micro-batches, rank 0: 0B0 can never run, as it needs 0F0, which comes later or waits for it; move 0F0 before it.",
    "incomplete": "parallel.schedule toy.py:incomplete for 2 ranks and 8 micro-batches, rank 0: 0B0 is missing, and each stage needs F and B (or I and W) of all 8 micro-batches; add it.",
    "of_two": "parallel.schedule toy.py:of_two for 2 ranks and 8 micro-batches has actions for 2 and 1; return those of the numbers it is given.",
    "broken": "parallel.schedule toy.py:broken for 2 ranks and 8 micro-batches failed (NameError: name 'ranks' is not defined); return a list of actions for each rank.",
    "refused": "parallel.schedule toy.py:refused supports no number of ranks and micro-batches (never).",
    "number": "parallel.schedule is toy.py:number but that is not a function; name one.",
    "lopped": "parallel.schedule is toy.py:lopped but toy.py has no lopped; the nearest is looped.",
}  # fmt: skip


@pytest.mark.parametrize("name", SENTENCES)
def test_what_a_config_says_of_a_function_that_breaks_a_rule(toy: str, name: str) -> None:
    with pytest.raises(UserError) as caught:
        resolved({"pp": 2, "schedule": f"toy.py:{name}"}, global_batch_size=3, micro_batch_size=1)
    assert str(caught.value) == SENTENCES[name]


def test_stages_stay_on_their_ranks(toy: str) -> None:
    with pytest.raises(UserError, match="differs with 6 micro-batches and with 8 in the ranks of its stages"):
        resolved({"pp": 2, "schedule": "toy.py:moving"}, global_batch_size=6, micro_batch_size=1)


def test_a_stored_config_runs_no_function_that_nobody_named(toy: str, tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    stored = tmp_path / "config.yaml"
    given: list[dict[str, Any]] = [{"schedule": toy}, {"fallbacks": (f"pp2 schedule={toy}",)}]
    for parallel in given:
        config = resolved({"pp": 2, **parallel}, gradient_accumulation_steps=4)
        with pytest.raises(UserError, match=r"code which runs only where you ask for it"):
            require_named_code(config, stored)

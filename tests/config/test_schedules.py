"""The table of pipeline schedules and CSV files of actions: names, shapes, and every rule that a file may break."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from threefold.config import Config
from threefold.config.resolve import resolve
from threefold.config.schedules import SCHEDULES, Action, OwnSchedule, find_schedule, read_schedule_file, schedule_name
from threefold.errors import UserError

ABSTRACT = ("PipelineScheduleSingle", "PipelineScheduleMulti")
ONE_F_ONE_B = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def write(folder: Path, text: str, name: str = "own.csv") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def resolved(parallel: dict[str, Any], **train: Any) -> Config:
    given = {"data": {"path": "x"}, "parallel": parallel, "train": train, "model": {"num_layers": 8}}
    return resolve(Config.model_validate(given), 1000)


def torch_names() -> list[str]:
    with pytest.raises(ValueError, match="valid options") as caught:
        get_schedule_class("none")
    return [name.strip(" '") for name in str(caught.value).partition("[")[2].rstrip("]").split(",")]


def test_whatever_torch_has_can_be_named() -> None:
    names = [name for name in torch_names() if name not in ABSTRACT]
    assert len(names) >= 7
    for name in names:
        schedule = find_schedule(name)
        for other in (name.upper(), name.lower(), f"Schedule{name}", f"schedule{name}".lower()):
            assert find_schedule(other) is schedule
        assert get_schedule_class(name).__name__ == schedule.torch_class  # type: ignore[attr-defined]


def test_a_class_of_torch_is_another_name_of_a_row() -> None:
    config = resolved({"pp": 2, "schedule": "ScheduleInterleaved1F1B"})
    assert config.parallel.schedule == "interleaved"
    assert config == resolved({"pp": 2, "schedule": "interleaved"})
    assert config.parallel.stage_chunks == 2


def test_a_schedule_travels_with_its_config(tmp_path: Path) -> None:
    for name in (*SCHEDULES, write(tmp_path, ONE_F_ONE_B)):
        config = resolved({"pp": 2, "schedule": name}, gradient_accumulation_steps=4 if name in SCHEDULES else 2)
        again = pickle.loads(pickle.dumps(config))
        assert again.parallel.pipeline_schedule.name == config.parallel.pipeline_schedule.name
    (tmp_path / "own.csv").unlink()
    assert again.parallel.pipeline_schedule.accepts(2, 2)  # read once, before there are workers


@pytest.mark.parametrize("given", ["zbw", "Schedule", "PipelineScheduleMulti", "3", "own.cvs"])
def test_a_wrong_name_lists_what_there_is(given: str) -> None:
    with pytest.raises(
        ValueError, match=r"\.csv file of actions, or one of 1f1b, gpipe, .* (the nearest is|use 1f1b)"
    ) as caught:
        schedule_name(given)
    for row in SCHEDULES.values():
        assert row.name in str(caught.value)
        assert row.torch_class in str(caught.value)


def test_facts_follow_from_a_file(tmp_path: Path) -> None:
    schedule = find_schedule(write(tmp_path, ONE_F_ONE_B))
    assert isinstance(schedule, OwnSchedule)
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

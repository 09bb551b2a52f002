"""The table of pipeline schedules: names, the rules of the settings beside them, and the default micro-batches."""

from typing import Any

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from threefold.config import Config
from threefold.config.resolve import resolve
from threefold.config.schedules import SCHEDULES, find_schedule, schedule_name
from threefold.errors import UserError

ABSTRACT = ("PipelineScheduleSingle", "PipelineScheduleMulti")


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


@pytest.mark.parametrize("given", ["zbw", "Schedule", "PipelineScheduleMulti", "3", "own.cvs"])
def test_a_wrong_name_lists_what_there_is(given: str) -> None:
    with pytest.raises(
        ValueError, match=r"\.csv file of actions, or one of 1f1b, gpipe, .* (the nearest is|use 1f1b)"
    ) as caught:
        schedule_name(given)
    for row in SCHEDULES.values():
        assert row.name in str(caught.value)
        assert row.torch_class in str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "train", "expected"),
    [
        ({"schedule": "zbv"}, {}, "parallel.schedule is zbv but there is no pipeline where parallel.pp is 1; use 1f1b or parallel.pp 2."),
        ({"pp": 2, "stage_chunks": 2}, {}, "parallel.stage_chunks is 2 but parallel.schedule 1f1b has 1 of them on each rank; use 1 or schedule interleaved."),
        ({"pp": 2, "stage_chunks": 3, "schedule": "dualpipev"}, {}, "parallel.stage_chunks is 3 but parallel.schedule dualpipev has 2 of them on each rank; use 2 or schedule zero-bubble."),
        ({"pp": 4, "stage_chunks": 3, "schedule": "looped-bfs"}, {}, "parallel.stage_chunks is 3 but parallel.pp 4 then has 12 stages for 10 layers, the embedding and the head among them; use 2 or model.num_layers 10."),
        ({"pp": 6, "schedule": "zbv"}, {}, "parallel.stage_chunks is 2 but parallel.pp 6 then has 12 stages for 10 layers, the embedding and the head among them; use parallel.pp 5 or model.num_layers 10."),
        ({"pp": 2, "schedule": "interleaved"}, {"global_batch_size": 42, "gradient_accumulation_steps": 7}, "train.gradient_accumulation_steps is 7 but parallel.schedule interleaved runs them in 3 equal rounds of at least parallel.pp 2; use 6."),
        ({"pp": 4, "schedule": "zero-bubble"}, {"global_batch_size": 11, "micro_batch_size": 1}, "train.gradient_accumulation_steps is 11 but parallel.schedule zero-bubble runs them in 2 equal rounds of at least parallel.pp 4; use 1."),
        ({"pp": 4, "schedule": "dualpipev"}, {"global_batch_size": 16, "micro_batch_size": 4}, "train.gradient_accumulation_steps is 4 but parallel.schedule dualpipev needs at least 2 for each of the 4 pipeline ranks; use 8."),
        ({"pp": 4, "schedule": "dualpipev"}, {"global_batch_size": 4, "micro_batch_size": 2}, "train.gradient_accumulation_steps is 2 but parallel.schedule dualpipev needs at least 2 for each of the 4 pipeline ranks; use 8 with train.global_batch_size 16."),
        ({"pp": 2, "partition": "even"}, {}, "parallel.partition is even but must be cost, uniform, uniform-chunks, class: and the name of a class, or a list of layers; use cost."),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(parallel: dict[str, Any], train: dict[str, int], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        resolved(parallel, **train)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("schedule", "pp", "total", "expected"),
    [
        ("interleaved", 2, 32, (8, 4)),
        ("interleaved", 4, 42, (6, 7)),  # 21 do not go into 5 equal rounds, nor 14 into 3
        ("zero-bubble", 3, 7, (7, 1)),
        ("dualpipev", 4, 32, (4, 8)),
        ("dualpipev", 4, 24, (3, 8)),
        ("zbv", 4, 6, (1, 6)),
    ],
)
def test_default_micro_batches_are_a_number_that_the_schedule_takes(
    schedule: str, pp: int, total: int, expected: tuple[int, int]
) -> None:
    train = resolved({"pp": pp, "schedule": schedule}, global_batch_size=total).train
    assert (train.micro_batch_size, train.gradient_accumulation_steps) == expected
    assert SCHEDULES[schedule].accepts(pp, train.gradient_accumulation_steps)

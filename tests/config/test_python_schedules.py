"""Schedules written in Python: what follows from their actions, and every rule that a function may break."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.config.python_schedules import TOY
from threefold.checkpoint.code import require_named_code
from threefold.checkpoint.folder import FOLDER
from threefold.config import Config
from threefold.config.resolve import resolve
from threefold.config.schedules import find_schedule
from threefold.errors import UserError
from threefold.planner.schedule import orders_of


def resolved(parallel: dict[str, Any], **train: Any) -> Config:
    given = {"data": {"path": "x"}, "parallel": parallel, "train": train, "model": {"num_layers": 8}}
    return resolve(Config.model_validate(given), 1000)


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

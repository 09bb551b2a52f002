"""Settings that change during a run: their values, and every rule on each of their entries."""

import copy
import pickle
from typing import Any

import pytest

from threefold.config.by_step import NumberByStep, described, entries_of, steps_to_sum, sum_before, value_at
from threefold.config.loading import config_of
from threefold.config.resolve import resolve
from threefold.config.schema import Config
from threefold.errors import UserError

SIZES = NumberByStep({0: 8, 3: 16, 5: 4})


def config(batch: Any, **more: Any) -> Config:
    sections: dict[str, dict[str, Any]] = {"data": {"path": "x"}, "train": {"global_batch_size": batch}}
    for key, value in more.items():
        section, name = key.split("_", 1)
        sections.setdefault(section, {})[name] = value
    return resolve(config_of(sections), 301)


def test_each_step_has_the_value_of_the_last_entry_before_it() -> None:
    values = [value_at(SIZES, step) for step in range(7)]
    assert values == [8, 8, 8, 16, 16, 4, 4]
    assert [sum_before(SIZES, step) for step in range(8)] == [sum(values[:step]) for step in range(7)] + [64]
    for value in (SIZES, 5):
        for wanted in range(-30, 80):
            steps = steps_to_sum(value, wanted)
            if wanted > 0:
                assert sum_before(value, steps - 1) < wanted <= sum_before(value, steps)
            else:
                assert steps == -(-wanted // value_at(value, 0))
    assert described(SIZES) == "8 (16 from step 4 on, 4 from step 6 on)"


def test_it_is_the_largest_number_and_no_other() -> None:
    assert SIZES * 2 == 32
    assert SIZES != 16
    assert NumberByStep({5: 4, 0: 8, 3: 16}) == SIZES
    assert pickle.loads(pickle.dumps(SIZES)) == copy.deepcopy(SIZES) == SIZES


def test_a_stored_config_has_the_entries() -> None:
    resolved = config({0: 8, 3: 16, 5: 4})
    assert config_of(resolved.sections()) == resolved
    assert resolved.sections()["train"]["global_batch_size"] == {0: 8, 3: 16, 5: 4}
    assert (resolved.train.micro_batch_size, resolved.train.gradient_accumulation_steps) == (4, 4)
    assert config_of(resolved.sections()).train.global_batch_size == SIZES
    parts = {"train_micro_batch_size": 4, "train_gradient_accumulation_steps": 4}
    assert config({0: 8, 3: 16}, **parts).train.global_batch_size == NumberByStep({0: 8, 3: 16})
    assert entries_of(config(8).train.global_batch_size) == ((0, 8),)


def test_epochs_count_the_samples_of_each_step() -> None:
    given = config_of({"data": {"path": "x"}, "train": {"global_batch_size": dict(SIZES.entries), "epochs": 2}})
    assert resolve(given, 301, samples=40).train.max_steps == 5 + 6  # 56 samples, and six batches of 4


@pytest.mark.parametrize(
    ("batch", "more", "expected"),
    [
        ({3: 4}, {}, "but must be a value, or values by the number of steps made before, .*; use {0: 4}"),
        ({}, {}, "but must be a value, .* use {0: VALUE}"),
        ({0: 4, True: 8}, {}, "must be a value, or values by .*"),
        ({0: 4, 3: 0}, {}, "its entry 3: 0 must be at least 1"),
        ({0: 4, 3: 4.5}, {}, "its entry 3: 4.5 must be a whole number"),
        ({0: 4, 3: 9}, {"parallel_dp": 2}, "its entry 3: 9 must be a multiple of parallel.dp 2; use 8"),
        (
            {0: 8, 3: 12},
            {"parallel_dp": 2, "train_micro_batch_size": 4},
            "its entry 3: 12 must be a multiple of train.micro_batch_size 4 · parallel.dp 2 = 8; use 16",
        ),
        (
            {0: 4, 3: 8},
            {"train_gradient_accumulation_steps": 1},
            "its entry 0: 4 must be a multiple of train.micro_batch_size 8 · parallel.dp 1 = 8; use 8",
        ),
        (
            {0: 8, 5: 11},
            {"parallel_pp": 4, "parallel_schedule": "interleaved", "train_micro_batch_size": 1, "model_num_layers": 8},
            "its entry 5: 11 is in 11 micro-batches, and parallel.schedule interleaved runs them in .*; use (10|12)",
        ),
        ({0: 8, 5: 16}, {"train_exact": True}, "train.exact is true, whose sums .*; use 16"),
    ],
    ids=str,
)
def test_each_entry_is_checked(batch: Any, more: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=rf"^train.global_batch_size is .*{expected}\.$"):
        config(batch, **more)

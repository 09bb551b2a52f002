"""`data.skip_steps`: what it may be, and which steps it has."""

from typing import Any

import pytest

from threefold.config.loading import config_of
from threefold.config.resolve import resolve
from threefold.errors import UserError
from threefold.resilience.rules import StepRanges

LIST = "a list of steps and ranges of steps from 1 on, such as [120, 300-320]"


@pytest.mark.parametrize(
    ("given", "ranges"),
    [
        ([], ()),
        (7, ((7, 7),)),
        ("7-9", ((7, 9),)),
        ([120, "300-320"], ((120, 120), (300, 320))),
        ([300, 2, "301 - 305", "3-4"], ((2, 4), (300, 305))),
        (["1-10", "4-6"], ((1, 10),)),
    ],
)
def test_ranges(given: Any, ranges: tuple[tuple[int, int], ...]) -> None:
    found = StepRanges.parse(given)
    assert found.ranges == ranges
    assert StepRanges.parse(found.written) == found
    skipped = {step for first, last in ranges for step in range(first, last + 1)}
    for step in range(1, 330):
        assert (step in found) == (step in skipped)
        assert found.next_outside(step) == next(other for other in range(step, 400) if other not in skipped)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (["5-3"], f"must be {LIST}, and 5-3 ends before it begins; use 3-5."),
        ([0], f"must be {LIST}."),
        (["-3"], f"must be {LIST}."),
        ([1.5], f"must be {LIST}."),
        ([True], f"must be {LIST}."),
        ("some", f"must be {LIST}."),
        ({"first": 1}, f"must be {LIST}."),
        ([10**13], f"must be {LIST}."),
        (["1-20"], "leaves none of the 20 steps of train.max_steps; leave one of them out of it."),
    ],
)
def test_refused_in_one_sentence(given: Any, rule: str) -> None:
    sections: dict[str, dict[str, Any]] = {
        "data": {"path": "x", "skip_steps": given},
        "train": {"max_steps": 20},
    }
    with pytest.raises(UserError) as caught:
        resolve(config_of(sections), 100)
    sentence = str(caught.value)
    assert sentence.startswith("data.skip_steps is ")
    assert sentence.endswith(rule)


def test_a_config_keeps_them() -> None:
    config = resolve(config_of({"data": {"path": "x", "skip_steps": ["300-320", 120]}}), 100)
    assert "skip_steps: [120, 300-320]" in config.to_yaml()
    assert config_of(config.sections()) == config

"""Requests of a search: what a number of tokens takes, and what is said where nothing answers."""

from collections.abc import Mapping
from typing import Any

import pytest

from threefold.errors import UserError
from threefold.planner.planning import Budget, no_layout, parse_tokens
from threefold.planner.search import Found


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("300B", 300 * 10**9), ("1.4T", 1_400_000_000_000), ("20e9", 20 * 10**9), ("5_000", 5000), ("7m", 7_000_000)],
)
def test_a_number_of_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "-3B", "300 GB", "1e99", "B"])
def test_no_number_of_tokens(text: str) -> None:
    with pytest.raises(UserError, match="--tokens"):
        parse_tokens(text)


def test_whole_steps_on_all_gpus() -> None:
    budget = Budget(1001, 100, 2.0, 3600, 0.5)
    assert (budget.steps, budget.seconds, budget.gpu_hours, budget.dollars) == (11, 22.0, 22.0, 11.0)
    assert budget.days == pytest.approx(22 / 86400)
    assert Budget(1, 1, 1.0, 1, None).dollars is None


def test_no_number_of_gpus_is_searched_twice() -> None:
    searched: list[int] = []

    def run(gpus: int, fixed: Mapping[str, Any]) -> Found:
        searched.append(gpus)
        return Found(0, int(gpus == 128), 0, 0, [], [], None, None, [], [])

    error = no_layout(1024, {}, Found(0, 0, 0, 0, [], [], None, None, [], []), run)
    assert str(error) == "--gpus is 1024 but no layout of so many GPUs is sound; use 128."
    assert len(searched) == len(set(searched))
    assert 1024 not in searched

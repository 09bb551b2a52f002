"""Requests that nothing answers: what the message says, without searching the same layouts twice."""

from collections.abc import Mapping
from typing import Any

from threefold.planner.planning import no_layout
from threefold.planner.search import Found


def test_no_number_of_gpus_is_searched_twice() -> None:
    searched: list[int] = []

    def run(gpus: int, fixed: Mapping[str, Any]) -> Found:
        searched.append(gpus)
        return Found(0, int(gpus == 128), 0, 0, [], [], None, None, [], [])

    error = no_layout(1024, {}, Found(0, 0, 0, 0, [], [], None, None, [], []), run)
    assert str(error) == "--gpus is 1024 but no layout of so many GPUs is sound; use 128."
    assert len(searched) == len(set(searched))
    assert 1024 not in searched

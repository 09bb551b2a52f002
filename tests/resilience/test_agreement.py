"""Ranks with different facts are named with their values and hosts; equal ones exchange four numbers."""

import os
from socket import gethostname
from unittest.mock import patch

import pytest
import torch.distributed as dist

from threefold.errors import UserError
from threefold.resilience.agreement import VARIABLES, facts_of_process, require_same, sources_checksum
from threefold.verify.worker_pool import WorkerPool


def told(mine: list[dict[str, str]], kinds: list[str]) -> tuple[str, list[str], list[int]]:
    """The error and the lines of a rank with facts `mine[rank]`, and the elements of its messages and gathers."""
    sizes, send, gather = list[int](), dist.send, dist.all_gather
    with (
        patch.object(dist, "send", lambda tensor, *args: sizes.append(tensor.numel()) or send(tensor, *args)),
        patch.object(dist, "all_gather", lambda every, one: sizes.append(one.numel()) or gather(every, one)),
    ):
        try:
            lines = require_same(mine[dist.get_rank()], {"the processor": kinds[dist.get_rank()]}, "make them equal")
        except UserError as error:
            return str(error), [], sizes
    return "", [str(each) for each in lines], sizes


def test_equal_facts_cost_three_small_messages_at_most(pool: WorkerPool) -> None:
    """However many ranks there are: one to the rank above, and two to those below."""
    for ranks in range(1, 9):
        results = pool.run(ranks, told, [{"lr": "0.1", "seed": "3"}] * ranks, ["EPYC"] * ranks)
        below = [[each for each in (2 * rank + 1, 2 * rank + 2) if each < ranks] for rank in range(ranks)]
        assert results == [("", [], [4] * ((rank > 0) + len(below[rank]))) for rank in range(ranks)]


def test_a_difference_is_found_wherever_it_is(pool: WorkerPool) -> None:
    for rank in range(8):
        facts = [{"lr": "0.2" if each == rank else "0.1"} for each in range(8)]
        for error, _, _ in pool.run(8, told, facts, ["EPYC"] * 8):
            assert f"on rank {rank} ({gethostname()})" in error


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        (
            [{"lr": "0.1", "seed": "3"}, {"lr": "0.1", "seed": "3"}, {"lr": "0.1", "seed": "4"}],
            "seed is 3 on ranks 0, 1 ({host}) but 4 on rank 2 ({host}); make them equal.",
        ),
        (
            [{"lr": "0.1", "seed": "3"}, {"lr": "0.2", "seed": "3"}, {"lr": "0.3", "seed": "4"}],
            "lr is 0.1 on rank 0 ({host}) but 0.2 on rank 1 ({host}), and seed differs too; make them equal.",
        ),
        (
            [{"lr": "0.1"}, {"lr": "0.1", "wd": "0"}, {"lr": "0.1"}],
            "wd is not known on ranks 0, 2 ({host}) but 0 on rank 1 ({host}); make them equal.",
        ),
    ],
)
def test_every_rank_names_the_difference(pool: WorkerPool, facts: list[dict[str, str]], sentence: str) -> None:
    results = pool.run(3, told, facts, ["EPYC"] * 3)
    assert [error for error, _, _ in results] == [sentence.format(host=gethostname())] * 3


def test_what_may_differ_is_told(pool: WorkerPool) -> None:
    for error, lines, _ in pool.run(2, told, [{"lr": "0.1"}] * 2, ["EPYC", "Xeon"]):
        assert error == ""
        assert lines == [f"the processor is EPYC on rank 0 ({gethostname()}) but Xeon on rank 1 ({gethostname()})"]


def test_a_process_has_versions_sources_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    before = facts_of_process()
    assert sources_checksum() in before["the version of Threefold"]
    for name in VARIABLES:
        monkeypatch.setenv(name, f"changed from {os.environ.get(name)}")
    after = facts_of_process()
    assert {name for name in after if after[name] != before[name]} == {
        f"the environment variable {name}" for name in VARIABLES
    }

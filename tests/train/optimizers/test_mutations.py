"""Tests of the tests: Muon that orthogonalises a rank's shard instead of the whole matrix does not pass for equal."""

from unittest.mock import patch

import pytest

from tests.support.parity import Case, Trace, departures, in_layout
from threefold.parallel.parameter import ShardedMatrix


def shard_alone(case: Case) -> Trace:
    with (
        patch.object(ShardedMatrix, "gather", lambda self, shard: shard),
        patch.object(ShardedMatrix, "shard", lambda self, whole, like: whole),
    ):
        return in_layout(case)


@pytest.mark.parametrize("changes", [{"tp": 2}, {"dp": 2, "settings": (("parallel.zero", 1),)}], ids=str)
def test_shard_orthogonalised_alone(pool, expected, changes: dict) -> None:
    case = Case(optimizer="muon", dtype="fp64", steps=2, **changes)
    found = departures(expected(case), pool.run(case.world_size, shard_alone, case), case)
    assert any("final blocks." in departure for departure in found)

"""S40: sharded data parallelism: what the replicas share changes no number, and frees the memory that it says."""

from dataclasses import replace

import pytest

from tests.support.parity import Case, departures, in_layout


def zero(stage: int, shards: int | None = None, **changes) -> Case:
    settings = (("parallel.zero", stage), *([("parallel.zero_shards", shards)] if shards else []))
    return Case(**{"dtype": "fp64", "dropout": 0.2, "steps": 2, "settings": settings, **changes})


def check(pool, expected, case: Case) -> None:
    found = departures(expected(case), pool.run(case.world_size, in_layout, case), case)
    assert not found, "\n".join(found[:10])


@pytest.mark.parametrize("layout", [(2, 1, 1), (3, 2, 1), (2, 1, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_layout(pool, expected, stage: int, layout: tuple[int, int, int]) -> None:
    """Three replicas and a vocabulary of 67 rows over two tensor ranks: no cut comes out even."""
    check(pool, expected, zero(stage).with_layout(*layout))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((2, 1, 1), {"dtype": "fp32", "accumulation": 3}),
        ((2, 1, 1), {"tie": False, "accumulation": 1}),
        ((2, 1, 2), {"dtype": "fp32", "optimizer": "sgd", "schedule": "gpipe", "accumulation": 3}),
        ((2, 2, 1), {"dtype": "fp32", "clip": 0.0}),
    ],
    ids=str,
)
def test_variant(pool, expected, stage: int, layout: tuple[int, int, int], changes: dict) -> None:
    check(pool, expected, zero(stage, **changes).with_layout(*layout))


@pytest.mark.parametrize("stage", [1, 3])
def test_some_ranks_have_nothing(pool, expected, stage: int) -> None:
    """The table of 13 positions has no row left for the last of eight replicas."""
    check(pool, expected, zero(stage, accumulation=1).with_layout(8, 1, 1))


@pytest.mark.parametrize(("stage", "layout"), [(1, (4, 1, 1)), (2, (4, 1, 2)), (3, (4, 2, 1))], ids=str)
def test_hybrid(pool, expected, stage: int, layout: tuple[int, int, int]) -> None:
    """Two copies, each shared by two neighbours."""
    check(pool, expected, zero(stage, shards=2).with_layout(*layout))


@pytest.mark.parametrize(("stage", "dp", "shards"), [(1, 1, 1), (2, 2, 2), (3, 4, 2)])
def test_context_ranks_share_too(pool, expected, stage: int, dp: int, shards: int) -> None:
    check(pool, expected, zero(stage, shards=shards, dp=dp, cp=2, sequence=16))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sequence_parallel(pool, expected, stage: int) -> None:
    """Norms and biases get partial gradients over tp, which are summed in their shards."""
    case = zero(stage, dp=2, tp=2, sequence=12)
    check(pool, expected, replace(case, settings=(*case.settings, ("parallel.sequence_parallel", True))))


@pytest.mark.parametrize(("stage", "schedule"), [(1, "interleaved"), (2, "looped-bfs"), (3, "interleaved")])
def test_several_stages_a_rank(pool, expected, stage: int, schedule: str) -> None:
    check(pool, expected, zero(stage, dp=2, pp=2, layers=4, schedule=schedule, accumulation=4))

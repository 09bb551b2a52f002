"""S22, S23, S24: every schedule with several stages a rank computes what one process computes."""

import pytest

from tests.support.parity import Case, departures, in_layout, make_engine, shard_of

SCHEDULES = ["interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev"]


def check(pool, expected, case: Case) -> None:
    found = departures(expected(case), pool.run(case.world_size, in_layout, case), case)
    assert not found, "\n".join(found[:10])


def chunked(schedule: str, chunks: int = 2, **changes) -> Case:
    base = {"dtype": "fp64", "layers": 7, "dropout": 0.1, "steps": 2, "accumulation": 8}
    return Case(**base | {"schedule": schedule, "settings": (("parallel.stage_chunks", chunks),)} | changes)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_a_rank(pool, expected, schedule: str, pp: int, tie: bool) -> None:
    check(pool, expected, chunked(schedule, pp=pp, tie=tie))


def evaluated(case: Case) -> tuple[float, float, float]:
    """The mean loss of the first batch: evaluated, trained on, and evaluated between two other steps."""
    engine = make_engine(case)
    batch = shard_of(case, 0, engine.mesh.dp.index)
    before, count = engine.evaluate(batch)
    trained = engine.train_step(batch, 0).loss
    loss, tokens = engine.compute_gradients(batch, 1)
    engine.evaluate(shard_of(case, 1, engine.mesh.dp.index))
    return before / count, trained, engine.update(loss, tokens, 1).grad_norm


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_evaluation_leaves_training_alone(pool, expected, schedule: str) -> None:
    case = chunked(schedule, pp=2, dropout=0.0, steps=1)
    one = pool.run(1, evaluated, case.unsplit)[0]
    for rank in pool.run(2, evaluated, case):
        assert rank == pytest.approx(one, rel=1e-12)
    assert one[0] == pytest.approx(expected(case).losses[0], rel=1e-12)

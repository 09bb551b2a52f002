"""Models of the user's own, with their own loss, in layouts against one process: layers that pass several tensors."""

from collections.abc import Callable

import pytest

from tests.support.custom_models import CustomBatches, CustomCase, custom_case, in_layout, make_engine, one_process
from tests.support.parity import Trace, departures
from tests.support.sweep import sweep

ALONE: dict[tuple[str, int, str], Trace] = {}


@pytest.fixture(scope="module")
def alone(pool) -> Callable[[CustomCase, str], Trace]:
    """What one process computes; once for all layouts."""

    def trace(own: CustomCase, kind: str) -> Trace:
        key = (kind, len(own.plan.layers), own.case.dtype)
        if key not in ALONE:
            ALONE[key] = pool.run(1, one_process, own)[0]
        return ALONE[key]

    return trace


LAYOUTS = [
    ("masked", {"pp": 2, "accumulation": 4, "dp": 2}),
    ("streams", {"pp": 4, "accumulation": 6}),
    ("streams", {"pp": 2, "tp": 2, "schedule": "zbv", "accumulation": 3}),
    ("masked", {"dp": 2, "tp": 2, "accumulation": 3}),
    ("masked", {"pp": 4, "tp": 2, "accumulation": 4}),
    ("masked", {"pp": 4, "accumulation": 2, "schedule": "gpipe"}),
    ("masked", {"pp": 2, "accumulation": 4, "schedule": "zero-bubble", "dp": 2}),
    ("masked", {"pp": 2, "accumulation": 4, "schedule": "dualpipev"}),
    ("streams", {"pp": 2, "accumulation": 4, "schedule": "interleaved", "dp": 2, "tp": 2}),
    ("streams", {"pp": 2, "accumulation": 1, "schedule": "looped-bfs"}),
    ("streams", {"pp": 2, "accumulation": 4, "schedule": "dualpipev", "dp": 2}),
    ("streams", {"dp": 4, "accumulation": 2, "settings": (("parallel.zero", 1),)}),
    ("masked", {"dp": 2, "pp": 2, "accumulation": 4, "settings": (("parallel.zero", 3),)}),
    ("streams", {"dp": 2, "pp": 2, "accumulation": 4, "schedule": "interleaved", "settings": (("parallel.zero", 2),)}),
    ("masked", {"dp": 2, "tp": 2, "pp": 2, "accumulation": 2, "settings": (("train.recompute", "full"),)}),
]


@sweep(
    ("kind", "layout", "dtype"),
    [(*each, dtype) for each in LAYOUTS for dtype in ("fp64", "fp32")],
    quick=(0, 4),
    slow=slice(1, None, 3),
)
def test_custom_models_compute_what_one_process_does(pool, alone, kind: str, layout: dict, dtype: str) -> None:
    own = custom_case(kind, blocks=4, dtype=dtype, **layout)
    traces = pool.run(own.case.world_size, in_layout, own)
    assert departures(alone(own, kind), traces, own.case) == []


def logged(own: CustomCase) -> tuple[dict[str, float], float, tuple[float, int]]:
    """The terms and the loss of a step, and an evaluation after it."""
    engine = make_engine(own)
    dp = engine.mesh.dp
    batch = CustomBatches(own.batches).batch(own.case.config, 0, dp.index, dp.size)
    result = engine.train_step(batch, 0)
    return dict(result.terms), result.loss, engine.evaluate(batch)


def test_terms_are_logged_and_evaluated_alike_in_every_layout(pool) -> None:
    (terms, loss, (total, samples)), *_ = pool.run(1, logged, custom_case("masked", dtype="fp64"))
    assert loss == pytest.approx(terms["tokens"] + 0.3 * terms["size"], rel=1e-12)
    assert samples == 24
    for found in pool.run(4, logged, custom_case("masked", dtype="fp64", dp=2, pp=2, accumulation=3)):
        assert found[0] == pytest.approx(terms, rel=1e-11)
        assert found[1] == pytest.approx(loss, rel=1e-11)
        assert found[2] == (pytest.approx(total, rel=1e-11), samples)

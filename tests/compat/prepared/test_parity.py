"""A prepared script gives what the plain script gives on one process: losses, gradients and weights of every update."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.compat.prepared.scripts import Script, Updates, plain, prepared, worst
from tests.support.sweep import sweep

TOLERANCE = {"float32": 2e-3, "float64": 1e-10}

ZERO = {stage: (("zero", stage),) for stage in (1, 2, 3)}
CASES = [
    (2, Script()),
    (3, Script("conv", "sgd", "float64", accumulate=2, clip=0.3)),
    (4, Script("stack", "adamw", "float64", accumulate=3, clip=0.3, options=ZERO[2])),
    (3, Script("encoder", "sgd", accumulate=3, clip=0.3, options=ZERO[3])),
    (2, Script("stack", "adafactor", "float64", options=ZERO[1])),
    (2, Script("stack", "adafactor", accumulate=2)),
    (4, Script("conv", "adamw", "float64")),
    (4, Script("conv", accumulate=4, clip=0.3)),
    (2, Script("conv", "sgd", "float64", accumulate=2, options=ZERO[1])),
    (3, Script("conv", "sgd", "float64", clip=0.3, options=ZERO[2])),
    (4, Script("conv", "sgd", "float64", accumulate=2, options=ZERO[3])),
    (4, Script("encoder", "adamw", "float64", accumulate=2, clip=0.3)),
    (3, Script("encoder", "adamw", "float64", rows=8, batch=7, clip=0.3, options=ZERO[1])),
    (4, Script("encoder", "sgd", "float64", accumulate=2, options=ZERO[2])),
    (2, Script("encoder", "adamw", "float64", accumulate=2, clip=0.3, options=ZERO[3])),
    (4, Script("encoder", "adamw", "float64", rows=9, batch=4)),  # the last batch has one row: three replicas none
    (4, Script("conv", "sgd", "float64", rows=9, batch=4, epochs=1)),
    (3, Script("stack", "sgd", workers=2)),
    (1, Script("conv", "adamw", "float64", accumulate=2, clip=0.3)),
]


@pytest.fixture(scope="module")
def one_process(pool) -> Callable[[Script], Updates]:
    known: dict[Script, Updates] = {}

    def compute(script: Script) -> Updates:
        script = replace(script, options=(), workers=0)
        if script not in known:
            known[script] = pool.run(1, plain, script)[0]
        return known[script]

    return compute


@sweep(("ranks", "script"), CASES, quick=(0, 1), slow=slice(0, None, 2), ids=str)
def test_every_update_is_that_of_one_process(pool, one_process, ranks: int, script: Script) -> None:
    expected = one_process(script)
    assert len(expected.weights) > 1
    for found in pool.run(ranks, prepared, script):
        assert worst(found, expected) < TOLERANCE[script.dtype]

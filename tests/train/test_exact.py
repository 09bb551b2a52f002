"""An exact run has the same bits in every layout inside its grain."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.parity import Case, Trace, make_engine, shard_of, trained
from threefold.launch.worker_pool import WorkerPool

EXACT = ("train.exact", True)
SP = ("parallel.sequence_parallel", True)
CASE = Case(
    layers=4,
    heads=8,
    head_dim=4,
    ffn=72,
    vocab=88,
    sequence=24,
    batch=16,
    accumulation=16,
    dropout=0.1,
    settings=(EXACT,),
)

Layout = tuple[int, int, int, dict[str, Any]]


def with_layout(case: Case, dp: int, tp: int, pp: int, schedule: str = "1f1b", micro: int = 1, **settings: Any) -> Case:
    named = tuple((key.replace("__", "."), value) for key, value in settings.items())
    return case.with_layout(
        dp, tp, pp, schedule=schedule, accumulation=case.batch // dp // micro, settings=(EXACT, *named)
    )


def exact_run(case: Case, threads: int = 1) -> Trace:
    """Train with a number of threads, and evaluate once."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        engine = make_engine(case)
        trace = trained(engine, case.steps, lambda step: shard_of(case, step, engine.mesh.dp.index))
        trace.losses.append(engine.evaluate(shard_of(case, 99, engine.mesh.dp.index))[0])
        trace.norms.append(0.0)
        trace.gradients.append({})
        return trace
    finally:
        torch.set_num_threads(before)


def differences(expected: Trace, found: Trace) -> list[str]:
    """Return what has other bits, in order: the first losses, norms, gradients, and weights."""
    different = []
    for step, (loss, norm) in enumerate(zip(expected.losses, expected.norms, strict=True)):
        if found.losses[step] != loss:
            different.append(f"loss of step {step}: {loss!r}, {found.losses[step]!r}")
        for name, gradient in found.gradients[step].items():
            if not same_bits(gradient, expected.gradients[step][name]):
                different.append(f"gradient of step {step}: {name}")
        if found.norms[step] != norm:
            different.append(f"norm of step {step}: {norm!r}, {found.norms[step]!r}")
    different += [
        f"weight: {name}" for name, weight in found.final.items() if not same_bits(weight, expected.final[name])
    ]
    return different


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())


@pytest.fixture(scope="module")
def one_process(pool: WorkerPool) -> Callable[[Case], Trace]:
    known: dict[Case, Trace] = {}

    def trace(case: Case) -> Trace:
        alone = with_layout(case, 1, 1, 1)
        if alone not in known:
            known[alone] = pool.run(1, exact_run, alone)[0]
        return known[alone]

    return trace


def check(pool: WorkerPool, expected: Trace, case: Case) -> None:
    for rank, found in enumerate(pool.run(case.world_size, exact_run, case)):
        assert not differences(expected, found)[:6], f"rank {rank} of {case}"


LAYOUTS = {
    "micro-batch": with_layout(CASE, 1, 1, 1, micro=4),
    "recompute": with_layout(CASE, 1, 1, 1, train__recompute="full"),
    "dp 2": with_layout(CASE, 2, 1, 1),
    "dp 8": with_layout(CASE, 8, 1, 1, micro=2),
    "tp 2": with_layout(CASE, 1, 2, 1),
    "tp 8": with_layout(CASE, 1, 8, 1),
    "tp 4 sp": with_layout(CASE, 1, 4, 1, parallel__sequence_parallel=True, train__recompute="selective"),
    "pp 3": with_layout(CASE, 1, 1, 3, micro=2),
    "interleaved": with_layout(CASE, 1, 1, 2, "interleaved"),
    "zero-bubble": with_layout(CASE, 1, 1, 2, "zero-bubble"),
    "zbv": with_layout(CASE, 1, 1, 2, "zbv"),
    "dualpipev": with_layout(CASE, 1, 1, 2, "dualpipev"),
    "dp 2 tp 2 pp 2": with_layout(CASE, 2, 2, 2, micro=4),
    "dp 4 tp 2 sp": with_layout(CASE, 4, 2, 1, parallel__sequence_parallel=True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bits_are_those_of_one_process(pool: WorkerPool, one_process: Callable[[Case], Trace], name: str) -> None:
    check(pool, one_process(CASE), LAYOUTS[name])


@pytest.mark.parametrize("threads", [2, 4])
def test_bits_do_not_depend_on_threads(pool: WorkerPool, one_process: Callable[[Case], Trace], threads: int) -> None:
    expected = one_process(CASE)
    (found,) = pool.run(1, exact_run, with_layout(CASE, 1, 1, 1), threads)
    assert not differences(expected, found)[:6]

"""Every optimizer of an exact run makes the same update whatever shards its weights, and in any number of threads."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.exact import CASE, check, differences, exact_run, with_layout
from tests.support.mistakes import Patch, with_mistake
from tests.support.parity import Case, Trace
from tests.support.sweep import sweep
from threefold.launch.worker_pool import WorkerPool
from threefold.train import optimizers
from threefold.train.optimizers import SGD, newton_schulz

FEW = replace(CASE, layers=2, vocab=344, ffn=200)  # a weight that two threads share, and shards with odd ends
OPTIMIZERS: dict[str, Case] = {
    "sgd": replace(FEW, optimizer="sgd", update=(("optimizer.eps", 1e-8),)),
    "momentum": replace(
        FEW, optimizer="sgd", update=(("optimizer.eps", 1e-8), ("optimizer.momentum", 0.9), ("optimizer.lr", 0.05))
    ),
    "nesterov": replace(
        FEW,
        optimizer="sgd",
        update=(
            ("optimizer.eps", 1e-8),
            ("optimizer.momentum", 0.9),
            ("optimizer.nesterov", True),
            ("optimizer.lr", 0.05),
        ),
    ),
    "adam": replace(FEW, optimizer="adam"),
    "lion": replace(FEW, optimizer="lion"),
    "muon": replace(FEW, optimizer="muon"),
}
LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "dp 4 zero 1": ((4, 1, 1), {"parallel__zero": 1}),
    "dp 2 tp 2 zero 3": ((2, 2, 1), {"parallel__zero": 3}),
    "tp 4": ((1, 4, 1), {}),
    "pp 2": ((1, 1, 2), {"micro": 4}),
}
CASES = {f"{name}, {layout}": (name, layout) for name in OPTIMIZERS for layout in LAYOUTS}


@sweep("case", CASES, quick=(8,), slow=(2, 7, 13, 18, 21))  # each optimizer, each layout
def test_bits_are_those_of_one_process(pool: WorkerPool, one_process: Callable[[Case], Trace], case: str) -> None:
    name, layout = CASES[case]
    sizes, settings = LAYOUTS[layout]
    check(pool, one_process(OPTIMIZERS[name]), with_layout(OPTIMIZERS[name], *sizes, **settings))


@pytest.mark.slow
@sweep("threads", [2, 4], slow=(0,))
@sweep("name", ["momentum", "lion", "muon"], slow=(0, 2))
def test_bits_do_not_depend_on_threads(
    pool: WorkerPool, one_process: Callable[[Case], Trace], name: str, threads: int
) -> None:
    few = replace(OPTIMIZERS[name], layers=1, steps=2)
    (found,) = pool.run(1, exact_run, with_layout(few, 1, 1, 1), threads)
    assert not differences(one_process(few), found)[:6]


def fused_kernel() -> list[Patch]:
    """As a run that is not exact has it."""

    def make(self: SGD, groups: Any) -> torch.optim.Optimizer:
        given = [{"params": params, "weight_decay": decay} for params, decay in groups]
        return torch.optim.SGD(given, lr=1.0, momentum=self.config.momentum, nesterov=True, fused=True)

    return [(SGD, "make", make)]


def torchs_products() -> list[Patch]:
    def plain(matrices: torch.Tensor, steps: int, exact: bool = False) -> torch.Tensor:
        return newton_schulz(matrices, steps)

    return [(optimizers, "newton_schulz", plain)]


def test_the_fused_kernel_of_momentum_is_found(pool: WorkerPool, one_process: Callable[[Case], Trace]) -> None:
    sizes, settings = LAYOUTS["dp 4 zero 1"]
    case = with_layout(OPTIMIZERS["nesterov"], *sizes, **settings)
    found = pool.run(4, with_mistake, fused_kernel, exact_run, case)
    assert differences(one_process(OPTIMIZERS["nesterov"]), found[0])[0].startswith("weight: ")


@pytest.mark.slow
def test_torchs_products_of_muon_are_found(pool: WorkerPool, one_process: Callable[[Case], Trace]) -> None:
    case = with_layout(OPTIMIZERS["muon"], 1, 1, 1)
    (found,) = pool.run(1, with_mistake, torchs_products, exact_run, case)
    first, *_ = differences(one_process(OPTIMIZERS["muon"]), found)
    assert first.startswith(("loss of step 1", "gradient of step 1")), "the first update is the first to differ"


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (3, 4, 6)])
def test_exact_muon_is_muon_up_to_rounding(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(newton_schulz(matrices, 5, exact=True), newton_schulz(matrices, 5), atol=1e-12)

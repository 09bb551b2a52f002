"""Gradients that one rank computes wrong, once or always, are found, and the rank is named."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.parity import Case, make_engine, over, shard_of
from threefold.comm.layout import Layout
from threefold.data.loader import Batch, BatchSlice
from threefold.errors import HardwareFault
from threefold.random import Int64Array
from threefold.resilience.corruption import CorruptionWatch, GradientCheck, Verdict, disagreement
from threefold.verify.worker_pool import WorkerPool


class CaseLoader:
    """The batches of a case, for any replica."""

    def __init__(self, case: Case, index: int) -> None:
        self.case, self.slice = case, BatchSlice(case.batch, index, case.dp)

    def of_replica(self, index: int) -> "CaseLoader":
        return CaseLoader(self.case, index)

    def batch(self, step: int) -> Batch:
        return shard_of(self.case, step, self.slice.dp_index)

    def rows(self, step: int) -> Int64Array:
        return self.slice.rows


class WrongOutput:
    """Flips a bit of what a module returns, at one of its calls or from it on."""

    def __init__(self, at: int, always: bool) -> None:
        self.at, self.always, self.calls = at, always, 0

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        self.calls += 1
        if self.calls - 1 != self.at and not (self.always and self.calls > self.at):
            return output
        wrong = output.detach().clone()
        wrong.view(torch.int32).view(-1)[5] ^= 1 << 12
        return output + (wrong - output.detach())


def found(case: Case, rank: int, at: int | None, always: bool) -> tuple[tuple[int, ...], str]:
    """Two watched steps, with an arithmetic unit of one rank that fails at a call of the first norm."""
    engine = make_engine(case)
    loader: Any = CaseLoader(case, engine.mesh.dp.index)
    watch = CorruptionWatch(engine, 1, gradients=GradientCheck(engine, loader))
    norms = [module for module in engine.model.modules() if "Norm" in type(module).__name__]
    if engine.mesh.rank == rank and at is not None:
        norms[0].register_forward_hook(WrongOutput(at, always))
    watch.before_fit(0)
    try:
        for done in range(2):
            watch.before_forward(done + 1)
            loss, tokens = engine.compute_gradients(loader.batch(done), done)
            watch.before_update(done + 1)
            engine.update(loss, tokens, done)
            watch.after_update(done + 1)
    except HardwareFault as fault:
        return fault.ranks, str(fault)
    return (), ""


QUIET = [
    Case(dropout=0.2).with_layout(4, 1, 1),
    Case(dropout=0.2).with_layout(2, 2, 2),
    replace(over(4, 2, 1, ep=2), dtype="fp32"),
    Case(settings=(("parallel.zero", 2), ("parallel.zero_shards", 2))).with_layout(4, 1, 1),
    Case(settings=(("parallel.zero", 3),), dtype="bf16").with_layout(4, 2, 1),
    Case(sequence=12).with_layout(2, 1, 2, cp=2),
    Case().with_layout(1, 2, 1),
    replace(over(2, 1, 1, ep=2), dtype="fp32"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", QUIET, ids=str)
def test_right_gradients_agree(pool: WorkerPool, case: Case) -> None:
    assert pool.run(case.world_size, found, case, 0, None, False)[0] == ((), "")


@pytest.mark.parametrize(
    ("at", "always"), [(0, False), pytest.param(2, False, marks=pytest.mark.slow), (4, True)], ids=str
)
def test_a_rank_that_computes_wrong_is_named(pool: WorkerPool, at: int, always: bool) -> None:
    """Calls 0 and 1 check the next replica's samples, 2 and 3 compute its own; from 4 on it is step 2."""
    ranks, sentence = pool.run(4, found, Case().with_layout(4, 1, 1), 2, at, always)[0]
    assert ranks == (2,)
    step = 2 if always else 1
    assert sentence.startswith(f"In step {step} rank 2 computed other gradients of the same samples than rank")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_with_zero(pool: WorkerPool, stage: int) -> None:
    case = Case(settings=(("parallel.zero", stage),)).with_layout(4, 1, 1)
    assert pool.run(4, found, case, 1, 2, False)[0][0] == (1,)


def test_who_is_at_fault() -> None:
    """Replicas 0 to 3, each checked by the one before it."""
    four = Layout(dp=4)
    assert disagreement([(1, 2)], [2], four) == Verdict((2,), True, (1,))
    assert disagreement([(1, 2)], [1], four) == Verdict((1,), True, (2,))
    assert disagreement([(1, 2)], [], four) == Verdict((1, 2), False, ())
    assert disagreement([(1, 2), (2, 3)], [], four) == Verdict((2,), True, (1, 3))
    assert disagreement([(0, 1), (1, 0)], [], Layout(dp=2)) == Verdict((0, 1), False, ())
    assert disagreement([(0, 2), (1, 3)], [2, 3], Layout(dp=2, tp=2)) == Verdict((2, 3), False, (0, 1))
    assert disagreement([(3, 3)], [3], Layout(tp=4)) == Verdict((3,), True, ())

"""Exact runs of mixtures of experts: the same bits whoever computes an expert, and for samples of several ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.exact import EXACT, MOE, check, check_near_plain, differences, exact_run, with_layout
from tests.support.mistakes import Patch, with_mistake
from tests.support.parity import Case, Trace
from tests.support.sweep import sweep
from threefold.launch.worker_pool import WorkerPool
from threefold.ops import exact, exact_experts, exact_products
from threefold.ops.exact import RowSum
from threefold.parallel.gradient_sums import SenderTrees


def moe(case: Case = MOE, **settings: Any) -> Case:
    """Return the case with other settings of the model."""
    return replace(case, model=tuple((dict(case.model) | settings).items()))


SP: dict[str, Any] = {"parallel__sequence_parallel": True}


def ep(ranks: int, **settings: Any) -> dict[str, Any]:
    return {"parallel__ep": ranks, **settings}


LAYOUTS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "micro-batch": (1, 1, 1, {"micro": 4}),
    "recompute": (2, 1, 1, {"train__recompute": "full", "micro": 2}),
    "tp 2": (1, 2, 1, {}),
    "tp 8 sp": (1, 8, 1, SP),
    "dp 8": (8, 1, 1, {}),
    "dp 2 tp 4 sp": (2, 4, 1, {"train__recompute": "full", **SP}),
    "dp 2 tp 2 pp 2": (2, 2, 2, {"micro": 4}),
    "zero-bubble tp 2 sp": (1, 2, 2, {"schedule": "zero-bubble", **SP}),
    "zero 3": (8, 1, 1, {"parallel__zero": 3}),
    "zero 2 tp 2 sp": (4, 2, 1, {"parallel__zero": 2, **SP}),
    "ep 2": (2, 1, 1, ep(2)),
    "ep 8": (8, 1, 1, ep(8, micro=2)),
    "ep 2 of dp 8": (8, 1, 1, ep(2)),
    "ep 4 recompute": (4, 1, 1, ep(4, train__recompute="full")),
    "ep 2 of dp 4 tp 2 sp": (4, 2, 1, ep(2, **SP)),
    "ep 2 pp 2": (4, 1, 2, ep(2)),
    "ep 2 zero-bubble": (2, 1, 2, ep(2, schedule="zero-bubble")),
    "ep 2 tp 2 zbv": (2, 2, 2, ep(2, schedule="zbv", **SP)),
    "ep 2 dualpipev": (2, 1, 2, ep(2, schedule="dualpipev")),
    "ep 2 interleaved": (4, 1, 2, ep(2, schedule="interleaved", micro=2)),
    "ep 2 zero 1": (4, 1, 1, ep(2, parallel__zero=1)),
    "ep 2 zero 3 of dp 8 over 4": (8, 1, 1, ep(2, parallel__zero=3, parallel__zero_shards=4)),
    "ep 4 zero 2 over 2": (8, 1, 1, ep(4, parallel__zero=2, parallel__zero_shards=2)),
    "ep 4 zero 3 tp 2 sp": (4, 2, 1, ep(4, parallel__zero=3, train__recompute="full", **SP)),
    "ep 2 zero 2 pp 2": (4, 1, 2, ep(2, parallel__zero=2, micro=2)),
}


@sweep("name", LAYOUTS, slow=(0, 2, 15, 23))
def test_bits_are_those_of_one_process(pool: WorkerPool, one_process: Callable[[Case], Trace], name: str) -> None:
    dp, tp, pp, settings = LAYOUTS[name]
    check(pool, one_process(MOE), with_layout(MOE, dp, tp, pp, **settings))


PLAIN = moe(
    num_experts=4,
    experts_per_token=1,
    expert_capacity_factor=0.0,
    normalize_expert_weights=False,
    shared_expert_ffn_hidden_size=0,
    shared_expert_gate=False,
    router_aux_loss=0.0,
)
"""Dropless, with one expert for each token, and no shared one."""


@sweep("case", [MOE, PLAIN], ids=["capacity", "dropless"], quick=(1,))
def test_exact_run_is_the_run_up_to_rounding(
    pool: WorkerPool, one_process: Callable[[Case], Trace], case: Case
) -> None:
    check_near_plain(pool, one_process(case), case)


@sweep("layout", [(4, 2, 1, ep(4, **SP)), (8, 1, 1, ep(8, parallel__zero=2))], slow=(1,))
def test_ranks_whose_experts_get_no_token(
    pool: WorkerPool, one_process: Callable[[Case], Trace], layout: tuple[int, int, int, dict[str, Any]]
) -> None:
    few = replace(moe(experts_per_token=1), sequence=2)
    dp, tp, pp, settings = layout
    check(pool, one_process(few), with_layout(few, dp, tp, pp, **settings))


@sweep("layout", [(2, 4, 1, {}), (4, 1, 2, ep(4, parallel__zero=1)), (4, 2, 1, ep(2, **SP))], slow=(1,))
def test_bf16(
    pool: WorkerPool, one_process: Callable[[Case], Trace], layout: tuple[int, int, int, dict[str, Any]]
) -> None:
    narrow = replace(MOE, dtype="bf16")
    dp, tp, pp, settings = layout
    check(pool, one_process(narrow), with_layout(narrow, dp, tp, pp, **settings))


@pytest.mark.slow
def test_bits_over_sockets(pool: WorkerPool, one_process: Callable[[Case], Trace]) -> None:
    check(pool, one_process(MOE), replace(with_layout(MOE, 4, 2, 1, **ep(2, **SP)), shared_memory=False))


@pytest.mark.slow
def test_norm_of_experts_that_zero_cuts_finer_than_tensor_pieces(
    pool: WorkerPool, one_process: Callable[[Case], Trace]
) -> None:
    odd = replace(MOE, vocab=89)
    assert odd.with_layout(1, 1, 1, settings=(EXACT,)).config.train.grain_tensor == 1
    check(pool, one_process(odd), with_layout(odd, 8, 1, 1, **ep(2, parallel__zero=3)))


def senders_added_in_a_chain() -> list[Patch]:
    def total(self: SenderTrees) -> Tensor:
        first, *others = (found for tree in self._trees if (found := tree.total()) is not None)
        return sum(others, first)

    return [(SenderTrees, "total", total)]


def samples_of_an_expert_in_one_product() -> list[Patch]:
    """As rows are computed without `train.exact`."""
    apart = exact_experts._of_senders

    def joined(x: Tensor, grad: Tensor, counts: list[int], experts: int) -> Tensor:
        parts = (each.split(counts) for each in (x, grad))
        of_expert = [[torch.cat(each[number::experts]) for number in range(experts)] for each in parts]
        rows, upper = map(torch.cat, of_expert)
        whole = apart(rows, upper, list(map(len, of_expert[0])), experts)
        return torch.stack([whole, *[torch.zeros_like(whole)] * (len(counts) // experts - 1)])

    return [(exact_experts, "_of_senders", joined)]


def router_summed_over_ranks_alone() -> list[Patch]:
    def of_weight(rows: RowSum, grad: Tensor, x: Tensor) -> Tensor:
        total = exact_products.product(grad.t(), x.t())
        return total if rows.over_ranks is None else rows.over_ranks(total)

    return [(exact, "_weight_gradient", of_weight)]


def expert_rows_not_in_pieces() -> list[Patch]:
    right = exact_experts.product
    return [(exact_experts, "product", lambda a, b, pieces=1, *cuts, **named: right(a, b, 1, *cuts, **named))]


MISTAKES = [
    (senders_added_in_a_chain, "ep 8"),
    (samples_of_an_expert_in_one_product, "ep 2"),
    (router_summed_over_ranks_alone, "dp 2 tp 4 sp"),
    (expert_rows_not_in_pieces, "tp 2"),
]


@sweep(("mistake", "name"), MISTAKES, slow=(0, 3))
def test_mistake_is_found(
    pool: WorkerPool, one_process: Callable[[Case], Trace], mistake: Callable[[], list[Patch]], name: str
) -> None:
    dp, tp, pp, settings = LAYOUTS[name]
    case = with_layout(MOE, dp, tp, pp, **settings)
    found = pool.run(case.world_size, with_mistake, mistake, exact_run, case)
    assert differences(one_process(MOE), found[0])[0].split(":")[0] in ("gradient of step 0", "loss of step 0")


@sweep("threads", [2, 4], slow=(0,))
def test_bits_do_not_depend_on_threads(pool: WorkerPool, one_process: Callable[[Case], Trace], threads: int) -> None:
    few = replace(MOE, layers=1)
    expected = one_process(few)
    (found,) = pool.run(1, exact_run, with_layout(few, 1, 1, 1), threads)
    assert not differences(expected, found)[:6]

"""An exact run has the same bits whatever moves its numbers between ranks, and in bf16."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.exact import CASE, check, differences, exact_run, slow_but, with_layout
from tests.support.parity import Case, Trace
from threefold.errors import UserError
from threefold.launch.worker_pool import WorkerPool

NARROW = replace(CASE, dtype="bf16")
PLAIN = replace(NARROW, head_dim=7, sequence=33, dropout=0.0)  # attention without dropout, and odd sizes

SOCKETS = {
    "dp 4": with_layout(CASE, 4, 1, 1),
    "tp 4": with_layout(CASE, 1, 4, 1),
    "dp 4 tp 2 sp": with_layout(CASE, 4, 2, 1, parallel__sequence_parallel=True),
    "dp 2 tp 2 pp 2": with_layout(CASE, 2, 2, 2, micro=4),
    "dp 4 zero 2": with_layout(CASE, 4, 1, 1, parallel__zero=2),
}
IN_BF16 = {
    "micro-batch": with_layout(NARROW, 1, 1, 1, micro=4),
    "recompute": with_layout(NARROW, 1, 1, 1, train__recompute="full"),
    "dp 2": with_layout(NARROW, 2, 1, 1),
    "tp 2": with_layout(NARROW, 1, 2, 1),
    "tp 8": with_layout(NARROW, 1, 8, 1),
    "tp 4 sp": with_layout(NARROW, 1, 4, 1, parallel__sequence_parallel=True, train__recompute="selective"),
    "pp 2": with_layout(NARROW, 1, 1, 2, micro=2),
    "zero-bubble": with_layout(NARROW, 1, 1, 2, "zero-bubble"),
    "dp 2 tp 2 pp 2": with_layout(NARROW, 2, 2, 2, micro=4),
    "dp 4 zero 3": with_layout(NARROW, 4, 1, 1, parallel__zero=3),
    "sockets": replace(with_layout(NARROW, 2, 4, 1), shared_memory=False),
}


@pytest.mark.parametrize("name", slow_but(SOCKETS, sweep=[*SOCKETS][::2]))
def test_bits_over_sockets(pool: WorkerPool, one_process: Callable[[Case], Trace], name: str) -> None:
    check(pool, one_process(CASE), replace(SOCKETS[name], shared_memory=False))


@pytest.mark.parametrize("name", slow_but(IN_BF16, sweep=[*IN_BF16][::2]))
def test_bits_in_bf16(pool: WorkerPool, one_process: Callable[[Case], Trace], name: str) -> None:
    check(pool, one_process(NARROW), IN_BF16[name])


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 8])
def test_bits_in_bf16_without_dropout(pool: WorkerPool, one_process: Callable[[Case], Trace], tp: int) -> None:
    check(pool, one_process(PLAIN), with_layout(PLAIN, 1, tp, 1))


@pytest.mark.parametrize("case", [NARROW, PLAIN], ids=["dropout", "plain"])
@pytest.mark.slow
@pytest.mark.parametrize("threads", slow_but([2, 4], sweep=[4]))
def test_bits_in_bf16_do_not_depend_on_threads(
    pool: WorkerPool, one_process: Callable[[Case], Trace], case: Case, threads: int
) -> None:
    few = replace(case, layers=1, steps=2)
    expected = one_process(few)
    (found,) = pool.run(1, exact_run, with_layout(few, 1, 1, 1), threads)
    assert not differences(expected, found)[:6]


@pytest.mark.parametrize(
    ("case", "key"),
    [
        (replace(CASE, dtype="fp16"), "precision.dtype"),
        (replace(CASE, dtype="fp64"), "precision.dtype"),
        (replace(NARROW, update=(("precision.master_weights", False),)), "precision.master_weights"),
        (replace(CASE, optimizer="torch.optim:RMSprop", update=(("optimizer.eps", 1e-8),)), "optimizer.name"),
    ],
)
def test_what_is_not_exact_is_refused(case: Case, key: str) -> None:
    with pytest.raises(UserError, match=f"^{key} .*train.exact is true, whose sums do not go together with it yet"):
        _ = with_layout(case, 2, 1, 1).config

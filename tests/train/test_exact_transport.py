"""An exact run has the same bits whatever moves its numbers between ranks, and in bf16."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.parity import Case, Trace
from tests.train.test_exact import CASE, check, one_process, with_layout  # noqa: F401 (a fixture)
from threefold.launch.worker_pool import WorkerPool

SOCKETS = {
    "dp 4": with_layout(CASE, 4, 1, 1),
    "tp 4": with_layout(CASE, 1, 4, 1),
    "dp 4 tp 2 sp": with_layout(CASE, 4, 2, 1, parallel__sequence_parallel=True),
    "dp 2 tp 2 pp 2": with_layout(CASE, 2, 2, 2, micro=4),
}


@pytest.mark.parametrize("name", SOCKETS)
def test_bits_over_sockets(pool: WorkerPool, one_process: Callable[[Case], Trace], name: str) -> None:  # noqa: F811
    check(pool, one_process(CASE), replace(SOCKETS[name], shared_memory=False))

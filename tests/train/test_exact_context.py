"""Exact runs with context parallelism: the bits of one process with the same pieces of each sequence."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.support.exact import CASE as GPT
from tests.support.exact import LLAMA as MASKED
from tests.support.exact import check, check_near_plain, differences, exact_run, with_layout
from tests.support.mistakes import Patch, with_mistake
from tests.support.parity import Case, Trace
from tests.support.sweep import sweep
from threefold.errors import UserError
from threefold.launch.worker_pool import WorkerPool
from threefold.models.layers.attention import CausalAttention
from threefold.models.layers.decoder import SampleInfo
from threefold.ops import exact
from threefold.parallel.context import ContextParallelAttention
from threefold.parallel.gradient_sums import LeafOrder
from threefold.random.rng import ALL

PIECES = 4
GRAIN = ("train.grain_context", PIECES)
SP: dict[str, Any] = {"parallel__sequence_parallel": True}
CASE = replace(GPT, layers=2, sequence=32, steps=2, settings=(*GPT.settings, GRAIN))
LLAMA = replace(MASKED, sequence=32, settings=CASE.settings)
NARROW = replace(CASE, dtype="bf16")
NARROW_LLAMA = replace(LLAMA, dtype="bf16", tie=True)
DOCUMENTS = replace(CASE, documents=True)


def layout(case: Case, cp: int, dp: int = 1, tp: int = 1, pp: int = 1, **settings: Any) -> Case:
    """Return an exact run with context parallelism."""
    return replace(with_layout(case, dp, tp, pp, **settings), cp=cp)


LAYOUTS: dict[str, tuple[Case, Case]] = {
    "cp 2": (CASE, layout(CASE, 2)),
    "cp 4": (CASE, layout(CASE, 4)),
    "cp 2 micro-batch recompute": (CASE, layout(CASE, 2, micro=4, train__recompute="full")),
    "cp 2 dp 4": (CASE, layout(CASE, 2, dp=4)),
    "cp 4 tp 2": (CASE, layout(CASE, 4, tp=2)),
    "cp 2 tp 4 sp": (CASE, layout(CASE, 2, tp=4, train__recompute="selective", **SP)),
    "cp 4 tp 2 sp": (CASE, layout(CASE, 4, tp=2, **SP)),
    "tp 8 sp": (CASE, layout(CASE, 1, tp=8, **SP)),
    "cp 2 dp 2 pp 2": (CASE, layout(CASE, 2, dp=2, pp=2, micro=2)),
    "cp 2 zero-bubble": (CASE, layout(CASE, 2, pp=2, schedule="zero-bubble")),
    "cp 2 zbv": (CASE, layout(CASE, 2, tp=2, pp=2, schedule="zbv")),
    "cp 2 zero 1": (CASE, layout(CASE, 2, parallel__zero=1)),
    "cp 2 dp 2 zero 2": (CASE, layout(CASE, 2, dp=2, parallel__zero=2)),
    "cp 2 dp 4 zero 3 over 2": (CASE, layout(CASE, 2, dp=4, parallel__zero=3, parallel__zero_shards=2)),
    "cp 2 dp 2 tp 2 zero 3": (CASE, layout(CASE, 2, dp=2, tp=2, parallel__zero=3)),
    "sockets": (CASE, replace(layout(CASE, 4, dp=2), shared_memory=False)),
    "sockets sp": (CASE, replace(layout(CASE, 2, dp=2, tp=2, **SP), shared_memory=False)),
    "llama cp 2": (LLAMA, layout(LLAMA, 2)),
    "llama cp 4 dp 2": (LLAMA, layout(LLAMA, 4, dp=2, train__recompute="selective")),
    "llama cp 2 tp 2 sp pp 2": (LLAMA, layout(LLAMA, 2, tp=2, pp=2, **SP)),
    "documents cp 2": (DOCUMENTS, layout(DOCUMENTS, 2)),
    "documents cp 2 tp 2 sp": (DOCUMENTS, layout(DOCUMENTS, 2, tp=2, **SP)),
    "documents cp 4 tp 2 sp": (DOCUMENTS, layout(DOCUMENTS, 4, tp=2, **SP)),
    "bf16 cp 2": (NARROW, layout(NARROW, 2)),
    "bf16 cp 4 tp 2 sp": (NARROW, layout(NARROW, 4, tp=2, **SP)),
    "bf16 cp 2 tp 2 sp zero 2": (NARROW, layout(NARROW, 2, dp=2, tp=2, parallel__zero=2, **SP)),
    "bf16 llama cp 2 tp 2": (NARROW_LLAMA, layout(NARROW_LLAMA, 2, tp=2)),
    "bf16 llama cp 4": (NARROW_LLAMA, layout(NARROW_LLAMA, 4, dp=2)),
}


@sweep("name", LAYOUTS, slow=(1, 9, 13, 16, 17, 20, 25))
def test_bits_are_those_of_one_process(pool: WorkerPool, one_process: Callable[[Case], Trace], name: str) -> None:
    case, spread = LAYOUTS[name]
    check(pool, one_process(case), spread)


@sweep("case", [CASE, LLAMA], ids=["gpt", "llama"], slow=(0, 1))
def test_exact_run_is_the_run_up_to_rounding(
    pool: WorkerPool, one_process: Callable[[Case], Trace], case: Case
) -> None:
    check_near_plain(pool, one_process(case), case)


@pytest.mark.parametrize(
    ("cp", "settings", "error"),
    [
        (2, {"train__grain_context": 1}, "parallel.cp is 2 but must divide train.grain_context 1, .*; use .*context 2"),
        (8, {}, "parallel.cp is 8 but must divide train.grain_context 4, .*; use train.grain_context 8"),
        (1, {"train__grain_context": 32}, "grain_context is 32 but .* twice which divides .* 32; use 16"),
        (1, {"train__grain_context": 3}, "grain_context is 3 but must be 1, or a power of two, .*; use 2"),
        (2, {"parallel__cp_method": "ring"}, "cp_method is ring but train.exact is true, .*; use all-gather"),
        (1, {"train__exact": False}, "grain_context is 4 but train.exact is false; leave it out"),
        (1, {"tp": 8, "train__grain_context": 8, **SP}, "tp is 8 but must divide the 4 pieces of a sequence"),
    ],
)
def test_layout_outside_the_grain_is_refused_with_the_nearest_inside(
    cp: int, settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(UserError, match=error):
        _ = layout(CASE, cp, **settings).config


def context_ranks_added_after_samples() -> list[Patch]:
    """As in any other run, with the sum over replicas."""
    return [(LeafOrder, "over_context", lambda self, gradient: gradient)]


def pieces_of_neighboring_chunks() -> list[Patch]:
    """Of which a context rank holds none whole."""

    def parts(x: Tensor, count: int, dim: int) -> list[Tensor]:
        return list(x.chunk(count, dim))

    return [(exact, "context_parts", parts)]


def attention_in_tiles_of_the_whole_sequence() -> list[Patch]:
    def of_whole(self: ContextParallelAttention, q: Tensor, k: Tensor, v: Tensor, samples: SampleInfo) -> Tensor:
        attention = CausalAttention(window=self.chunks[0].window)  # type: ignore[arg-type]
        attention.exact, attention.dropout = True, self.chunks[0].dropout.of_part({2: ALL})  # type: ignore[operator, union-attr, assignment]
        return attention(q, k, v, samples)

    return [(ContextParallelAttention, "forward", of_whole)]


MISTAKES = [
    (context_ranks_added_after_samples, "cp 2", "gradient of step 0"),
    (pieces_of_neighboring_chunks, "alone", "loss of step 0"),
    (attention_in_tiles_of_the_whole_sequence, "alone", "loss of step 0"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "name", "sign"), MISTAKES)
def test_mistake_is_found(
    pool: WorkerPool,
    one_process: Callable[[Case], Trace],
    mistake: Callable[[], list[Patch]],
    name: str,
    sign: str,
) -> None:
    case = layout(CASE, 1) if name == "alone" else LAYOUTS[name][1]
    found = pool.run(case.world_size, with_mistake, mistake, exact_run, case)
    assert differences(one_process(CASE), found[0])[0].startswith(sign)

"""Compiled layers compute what one process computes without compiling, in every kind of layout.

All layers that are alike are compiled once, in the first step, and nothing is compiled after it. The quick tests run
the compiled graphs operation by operation; the slow ones have torch write C++ code of them.
"""

import shutil
from dataclasses import replace

import pytest
from torch._dynamo.utils import counters

from tests.support.compiled import traced
from tests.support.parity import (
    LLAMA,
    MOE,
    Case,
    Trace,
    check,
    departures,
    make_engine,
    shard_of,
    trained,
    with_recompute,
)
from tests.support.sweep import sweep

SP = (("parallel.sequence_parallel", True),)
RING = (("parallel.cp_method", "ring"),)
SMALL = Case(compile=True, layers=3, sequence=12, steps=2, dropout=0.2)
HEAD = 1
"""A graph of its own."""


def in_layout_counted(case: Case) -> tuple[Trace, int, int, int]:
    """Run the engine on this rank, with an evaluation after its first step.

    Returns:
        the trace, the number of graphs (each with its forward and backward pass) compiled in the first step, the number
        compiled later, and the number of places where layers could not be compiled whole.
    """
    counters.clear()
    engine, first = make_engine(case), 0

    def after(step: int) -> None:
        nonlocal first
        if step == 0:
            first = counters["stats"]["unique_graphs"]
            engine.evaluate(shard_of(case, step, engine.mesh.dp.index))

    trace = trained(engine, case.steps, lambda step: shard_of(case, step, engine.mesh.dp.index), after)
    return trace, first, counters["stats"]["unique_graphs"] - first, sum(counters["graph_break"].values())


def traces(pool, expected, case: Case) -> list[tuple[int, int, int]]:
    """Of each rank: graphs of the first step, of anything later, and breaks; after the comparison with one process."""
    found = pool.run(case.world_size, traced, in_layout_counted, case)
    wrong = departures(expected(case), [trace for trace, *_ in found], case)
    assert not wrong, "\n".join(wrong[:10])
    return [(first, later, breaks) for _, first, later, breaks in found]


@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        pytest.param(SMALL.with_layout(1, 2, 1), marks=pytest.mark.slow),
        pytest.param(SMALL.with_layout(1, 2, 1, settings=SP), marks=pytest.mark.slow),
        pytest.param(with_recompute(SMALL, "full"), marks=pytest.mark.slow),
        pytest.param(SMALL.with_layout(1, 1, 1, cp=2), marks=pytest.mark.slow),
        pytest.param(SMALL.with_layout(2, 1, 1, settings=(("parallel.zero", 3),)), marks=pytest.mark.slow),
        pytest.param(SMALL.with_layout(2, 1, 1, settings=(("parallel.zero", 2),)), marks=pytest.mark.sweep),
        pytest.param(SMALL.with_layout(2, 1, 1, settings=(("parallel.zero", 1),)), marks=pytest.mark.sweep),
    ],
    ids=lambda case: f"{case.dp}-{case.tp}-{case.pp}-{case.cp} {dict(case.settings)}",
)
def test_blocks_are_compiled_once_and_whole(pool, expected, case: Case) -> None:
    """With dropout, of which each block has masks of its own."""
    assert traces(pool, expected, case) == [(1 + HEAD, 0, 0)] * case.world_size


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(name, marks=pytest.mark.slow) for name in ("zero-bubble", "zbv", "dualpipev")],
)
def test_deferred_weight_gradients(pool, expected, schedule: str) -> None:
    """Ranks without the head compile the block alone."""
    case = replace(SMALL, layers=4, dropout=0.0, accumulation=4, steps=1).with_layout(1, 1, 2, schedule=schedule)
    counts = traces(pool, expected, case)
    assert sorted(counts) == [(1, 0, 0), (1 + HEAD, 0, 0)]


@sweep("schedule", ["1f1b", "zero-bubble"], slow=(1,))
def test_attention_that_is_computed_again_runs_between_compiled_parts(pool, expected, schedule: str) -> None:
    case = replace(SMALL, dropout=0.0, steps=1).with_layout(1, 2, 2, schedule=schedule, settings=SP)
    counts = traces(pool, expected, with_recompute(case, "selective"))
    assert all(later == 0 and breaks for _, later, breaks in counts)
    assert all(breaks == 0 for _, _, breaks in traces(pool, expected, case))


@pytest.mark.slow
def test_loss_in_chunks_runs_between_compiled_parts(pool, expected) -> None:
    case = SMALL.with_layout(1, 2, 1, settings=(*SP, ("train.loss_chunk_size", 5)))
    counts = traces(pool, expected, case)
    assert all(first >= 1 + HEAD and later == 0 for first, later, _ in counts)


@pytest.mark.slow
def test_ring_attention_runs_between_compiled_parts(pool, expected) -> None:
    """The same parts in every block."""
    few, many = (
        traces(pool, expected, replace(SMALL, layers=layers, steps=1).with_layout(1, 1, 1, cp=2, settings=RING))
        for layers in (2, 4)
    )
    assert few == many
    assert all(later == 0 and breaks for _, later, breaks in many)


@sweep(("case", "kinds"), [(LLAMA, 2), (MOE, None)], ids=["llama", "experts"], slow=(1,))
def test_other_models(pool, expected, case: Case, kinds: int | None) -> None:
    """Blocks with a window and without are of two kinds; experts run between compiled parts."""
    compiled = replace(case, compile=True, steps=2).with_layout(1, 2, 1, settings=(*case.settings, *SP))
    for first, later, breaks in traces(pool, expected, compiled):
        assert later == 0
        assert (kinds is None) == (breaks > 0)
        assert kinds is None or first == kinds + HEAD


needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on a CPU")
CODED = Case(layers=2, compile=True, steps=2, sequence=12)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(replace(CODED, dropout=0.2).with_layout(2, 1, 2), marks=pytest.mark.sweep),
        replace(CODED, dropout=0.2).with_layout(1, 2, 1, settings=SP),
        pytest.param(replace(CODED, layers=3).with_layout(1, 1, 2, schedule="zero-bubble"), marks=pytest.mark.sweep),
        with_recompute(replace(CODED, layers=3, dropout=0.2), "full", 2).with_layout(
            2, 1, 1, settings=(("parallel.zero", 3), ("train.recompute", "full"), ("train.recompute_every", 2))
        ),
    ],
    ids=["dp-pp-dropout", "sp-dropout", "zero-bubble", "zero3-full"],
)
def test_compiled_layers(pool, expected, case: Case) -> None:
    check(pool, expected, case)

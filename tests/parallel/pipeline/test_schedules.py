"""Every schedule with several stages a rank computes what one process computes."""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.parallel.pipeline.pipelines import alone, chunked
from tests.support.parity import Case, check, in_layout, make_engine, shard_of
from tests.support.sweep import sweep
from threefold.config.schedules import SCHEDULES as ROWS
from threefold.config.schedules import Action
from threefold.parallel.pipeline import runner
from threefold.parallel.pipeline.runner import PipelineRunner
from threefold.parallel.pipeline.scheduled_stage import ScheduledStage
from threefold.parallel.pipeline.schedules import DeferredGradients, actions
from threefold.planner.schedule import simulate
from threefold.verify.compare import relative_error
from threefold.verify.worker_pool import WorkerError

SINGLE = ["1f1b", "gpipe"]
SCHEDULES = ["interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev"]


@sweep(("pp", "tie"), [(2, False), (4, True)], ids=["pp2-untied", "pp4-tied"], quick=(1,), slow=())
@sweep("schedule", SCHEDULES, quick=(3,))  # of the others, `test_few_and_many_micro_batches` has some
def test_two_stages_a_rank(pool, expected, schedule: str, pp: int, tie: bool) -> None:
    check(pool, expected, chunked(schedule, pp=pp, tie=tie))


@sweep(
    ("schedule", "chunks", "pp", "micro_batches"),
    [
        ("interleaved", 3, 2, 1),
        ("interleaved", 3, 3, 6),
        ("interleaved", 2, 4, 2),
        ("looped-bfs", 3, 2, 3),
        ("looped-bfs", 2, 4, 1),
        ("zero-bubble", 1, 4, 4),  # ZB-H1
        ("zero-bubble", 3, 3, 2),
        ("zero-bubble", 4, 2, 6),
        ("zbv", 2, 4, 1),
        ("zbv", 2, 3, 4),
        ("dualpipev", 2, 3, 6),
        ("dualpipev", 2, 2, 12),
    ],
    quick=(2, 5, 7, 9),
    slow=slice(0, None, 2),
)
def test_few_and_many_micro_batches(pool, expected, schedule: str, chunks: int, pp: int, micro_batches: int) -> None:
    check(pool, expected, chunked(schedule, chunks, pp=pp, accumulation=micro_batches))


@pytest.mark.slow
def test_narrow_deferred_gradients_are_accumulated_wide(pool) -> None:
    """Twenty-four micro-batches in bf16: added up in bf16, their gradients would be off by a part in a hundred."""
    settings = {"dtype": "bf16", "accumulation": 24, "steps": 4, "layers": 4}
    plain = pool.run(1, in_layout, Case(**settings))[0]
    held: dict[str, Any] = {}
    for trace in pool.run(2, in_layout, chunked("zero-bubble", pp=2, **settings, dropout=0.0)):
        assert trace.losses == pytest.approx(plain.losses, rel=1e-3)
        held |= trace.gradients[0]
    assert held.keys() == plain.gradients[0].keys()
    errors = {name: relative_error(held[name], plain.gradients[0][name]) for name in held if "qkv.bias" not in name}
    assert all(error < 4e-3 for error in errors.values()), errors


def evaluated(case: Case) -> tuple[float, float, float]:
    """The mean loss of the first batch: evaluated, trained on, and evaluated between two other steps."""
    engine = make_engine(case)
    batch = shard_of(case, 0, engine.mesh.dp.index)
    before, count = engine.evaluate(batch)
    trained = engine.train_step(batch, 0).loss
    loss, tokens = engine.compute_gradients(batch, 1)
    engine.evaluate(shard_of(case, 1, engine.mesh.dp.index))
    return before / count, trained, engine.update(loss, tokens, 1).grad_norm


@sweep("schedule", ["interleaved", "zero-bubble", "zbv"], quick=(1,))
def test_evaluation_leaves_training_alone(pool, expected, schedule: str) -> None:
    case = chunked(schedule, pp=2, dropout=0.0, steps=1)
    one = pool.run(1, evaluated, case.unsplit)[0]
    for rank in pool.run(2, evaluated, case):
        assert rank == pytest.approx(one, rel=1e-12)
    assert one[0] == pytest.approx(expected(case).losses[0], rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rules_for_micro_batches_are_those_of_torch_and_no_rank_waits_for_ever(schedule: str) -> None:
    for pp in (2, 3, 4):
        for chunks in (2,) if ROWS[schedule].shape == "v" else (1, 2, 3):
            for count in range(1, 4 * pp + 3):
                try:
                    orders = [actions(alone(schedule, pp, chunks, rank, count)) for rank in range(pp)]
                except ValueError:
                    assert not ROWS[schedule].accepts(pp, count)
                    continue
                assert ROWS[schedule].accepts(pp, count)
                timeline = simulate(orders, lambda action: {"F": 1, "B": 2, "I": 1, "W": 1}[action.kind])
                assert sum(timeline.busy) == 3 * count * pp * chunks


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_stages_are_where_torch_has_them(schedule: str, pp: int) -> None:
    for chunks in (2,) if ROWS[schedule].shape == "v" else (1, 2, 3):
        torchs = alone(schedule, pp, chunks, 0, 2 * pp).stage_index_to_group_rank
        assert tuple(torchs[number] for number in range(pp * chunks)) == ROWS[schedule].stage_ranks(pp, chunks)


def most_alive(order: list[Action]) -> int:
    """Micro-batches whose activations a rank holds at once, over its stages."""
    alive = [{"F": 1, "B": -1, "I": -1, "W": 0}[action.kind] for action in order]
    return max(sum(alive[: end + 1]) for end in range(len(alive)))


def most_alive_with_deferred(order: list[Action]) -> int:
    """The same, counted until their weight gradients are computed, which need what a forward pass kept as well."""
    alive = [{"F": 1, "B": -1, "I": 0, "W": -1}[action.kind] for action in order]
    return max(sum(alive[: end + 1]) for end in range(len(alive)))


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if ROWS[name].defers_weight_gradients])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_deferred_gradients_keep_a_bounded_number_of_micro_batches(schedule: str, pp: int) -> None:
    """However many there are: at most two more passes on each stage than without deferred gradients."""
    for chunks in (2,) if ROWS[schedule].shape == "v" else (1, 2, 3):
        few, many = (
            [most_alive_with_deferred(actions(alone(schedule, pp, chunks, rank, count))) for rank in range(pp)]
            for count in (4 * pp, 32 * pp)
        )
        assert few == many
        assert max(many) <= 2 * pp * chunks + 1


def alive_in_a_step(case: Case) -> tuple[int, int, int]:
    """The most forward passes whose activations this rank had in memory at once, waiting for their backward pass or
    for their weight gradients: what was there, and what is planned; and the most deferred weight gradients that were in
    memory, each with the activations that it is computed from."""
    engine = make_engine(case)
    deferred = engine.parallelism.deferred
    assert isinstance(engine.runner, PipelineRunner)
    assert deferred is not None
    stages, seen, in_memory = engine.runner.scheduled_stages, [0], [0]
    gradients: weakref.WeakSet[Any] = weakref.WeakSet()
    defer = DeferredGradients.defer

    def watched(self: DeferredGradients, leaf: Tensor, gradient: Any) -> None:
        gradients.add(gradient)
        defer(self, leaf, gradient)

    def counted(call: Any) -> Any:
        def counting(self: ScheduledStage, *args: Any, **options: Any) -> Any:
            result = call(self, *args, **options)
            seen.append(sum(len(stage.fwd_cache) for stage in stages) + deferred._outstanding)
            in_memory.append(len(gradients))
            return result

        return counting

    passes = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    with ExitStack() as patches:
        patches.enter_context(patch.object(DeferredGradients, "defer", watched))
        for name in passes:
            patches.enter_context(patch.object(ScheduledStage, name, counted(getattr(ScheduledStage, name))))
        engine.train_step(shard_of(case, 0, engine.mesh.dp.index), 0)
    assert seen[-1] == in_memory[-1] == 0
    return max(seen), most_alive_with_deferred(engine.runner.actions()), max(in_memory)


@sweep(
    ("schedule", "chunks", "pp"),
    [("zero-bubble", 1, 2), ("zero-bubble", 1, 4), ("zero-bubble", 2, 2), ("zbv", 2, 2), ("dualpipev", 2, 2)],
    quick=(0,),
)
def test_live_activations_do_not_grow_with_the_micro_batches(pool, schedule: str, chunks: int, pp: int) -> None:
    few, many = (
        pool.run(pp, alive_in_a_step, chunked(schedule, chunks, pp=pp, batch=32, sequence=3, accumulation=count))
        for count in (8, 32)
    )
    assert few == many
    assert all(there == planned for there, planned, _ in many)
    assert all(gradients > 0 for _, _, gradients in many)


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_how_many_micro_batches_a_rank_holds(pp: int) -> None:
    """As in docs/parallel/pipeline.md, for two stages a rank, in passes of one stage."""
    count, ranks = 4 * pp, range(pp)

    def held(schedule: str) -> list[int]:
        return [most_alive(actions(alone(schedule, pp, 2, rank, count))) for rank in ranks]

    assert held("interleaved") == [pp + 2 * (pp - 1 - rank) + 1 for rank in ranks]
    assert held("zero-bubble") == [pp + (pp - 1 - rank) + 1 for rank in ranks]
    assert held("looped-bfs") == [2 * count] * pp
    assert held("zbv") == [2 * pp] * pp
    assert max(held("dualpipev")) <= 2 * pp + 1


@pytest.mark.parametrize(
    ("schedule", "chunks", "idle", "kept"),
    [
        ("gpipe", 1, (27, 16), ("all", "all")),
        ("1f1b", 1, (27, 16), (4, 1)),
        ("looped-bfs", 2, (16, 9), ("all", "all")),
        ("interleaved", 2, (16, 9), (5.5, 2.5)),
        ("zero-bubble", 1, (11, 6), (4, 1)),
        ("zero-bubble", 2, (6, 3), (4, 2.5)),
        ("zbv", 2, (6, 3), (4, 4)),
        ("dualpipev", 2, (6, 3), (4.5, 4.5)),
    ],
)
def test_the_table_of_the_docs(
    schedule: str, chunks: int, idle: tuple[int, int], kept: tuple[float | str, float | str]
) -> None:
    pp = 4
    for count, share in zip((8, 16), idle, strict=True):
        orders = [actions(alone(schedule, pp, chunks, rank, count)) for rank in range(pp)]
        timeline = simulate(orders, lambda action: {"F": 1, "B": 2, "I": 1, "W": 1}[action.kind])
        assert round(100 * timeline.idle) == share
        held = [most_alive(orders[rank]) / chunks for rank in (0, pp - 1)]
        assert held == [count if each == "all" else each for each in kept]
    row = next(
        line
        for line in Path("docs/parallel/pipeline.md").read_text().splitlines()
        if line.startswith(f"| `{schedule}` |") and (f"here {chunks}" in line or "here" not in line)
    )
    assert f"| {idle[0]} %, {idle[1]} % | {kept[0]}, {kept[1]} |" in row


def timed(case: Case) -> tuple[list[Action], list[Action], int]:
    """What was planned and what was done in a step, and the buffers that are left after it."""
    engine = make_engine(case)
    assert isinstance(engine.runner, PipelineRunner)
    batch = shard_of(case, 0, engine.mesh.dp.index)
    with engine.runner.timing() as log:
        engine.train_step(batch, 0)
    engine.train_step(batch, 1)
    engine.evaluate(batch)
    assert all(before.end <= after.start for before, after in pairwise(log))
    pipes = (*engine.runner.scheduled_stages, *engine.runner._eval._stages)  # type: ignore[attr-defined]
    infos = [info for pipe in pipes for each in (pipe.args_recv_info, pipe.grad_recv_info) for info in each.values()]
    kept = [info for several in infos for info in several if info.buffer is not None]
    kept += [each for pipe in pipes for pair in pipe.fwd_cache.values() for each in (*pair[0], *pair[1])]
    kept += [each for pipe in pipes for several in pipe.bwd_cache.values() for each in several if each is not None]
    return engine.runner.actions(), [each.action for each in log], len(kept)


@pytest.mark.parametrize("schedule", [*SINGLE, *SCHEDULES])
def test_what_is_planned_is_done_and_no_buffer_stays(pool, schedule: str) -> None:
    case = chunked(schedule, 1 if schedule in SINGLE else 2, pp=2, accumulation=4)
    for planned, done, kept in pool.run(2, timed, case):
        assert planned == done
        assert kept == 0
        assert ("W" in {action.kind for action in done}) == ROWS[schedule].defers_weight_gradients


def metadata(case: Case) -> list[int]:
    """Bytes of each message between stages that is not an activation and no gradient, step by step."""
    engine = make_engine(case)
    assert isinstance(engine.runner, PipelineRunner)
    counts, sizes = [], []

    @contextmanager
    def counting(name: str) -> Iterator[None]:
        call = getattr(dist, name)

        def counted(value: Any, *args: Any, **options: Any) -> Any:
            sizes.append(value.nbytes if hasattr(value, "nbytes") else 1 << 20)
            return call(value, *args, **options)

        with patch.object(dist, name, counted):
            yield

    for step in range(2):
        sizes.clear()
        with counting("send"), counting("send_object_list"):
            engine.train_step(shard_of(case, step, engine.mesh.dp.index), step)
        counts.append(sum(sizes))
    return counts


@sweep("schedule", ["zero-bubble", "dualpipev"], quick=(0,))
def test_stages_exchange_no_metadata(pool, schedule: str) -> None:
    """At the first step four bytes each way and stage: torch's stages agree that all shapes are declared."""
    for first, later in pool.run(2, metadata, chunked(schedule, pp=2, accumulation=4)):
        assert first <= 4 * 2 * 2
        assert later == 0


def declared_wrongly(case: Case) -> None:
    make = ScheduledStage.__init__

    def wrong(self: ScheduledStage, *args: Any) -> None:
        *others, shapes, deferred, sends, mailbox, order = args
        inputs, outputs = shapes
        outputs = tuple(each[:, 1:] if each.dim() else each for each in outputs)
        make(self, *others, (inputs, outputs), deferred, sends, mailbox, order)

    with patch.object(runner.ScheduledStage, "__init__", wrong):
        in_layout(case)


def test_a_wrong_declaration_is_an_error(pool) -> None:
    with pytest.raises(
        WorkerError, match=r"stage \d gave activations \[6, 11, 36\] of torch.float64, but \[6, 10, 36\]"
    ):
        pool.run(2, declared_wrongly, chunked("interleaved", pp=2, accumulation=4))

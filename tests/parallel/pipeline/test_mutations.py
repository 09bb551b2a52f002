"""Tests of the tests: known mistakes of pipelines, put back on purpose, must make the parity comparison fail."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from tests.parallel.pipeline import tied_model
from tests.support.mistakes import (
    Patch,
    logged_loss_of_the_first_stage,
    logged_loss_of_the_last_micro_batch,
    logged_loss_of_the_last_rank,
    patched,
    with_mistake,
)
from tests.support.parity import Case, departures, in_layout
from threefold.config.schedules import TorchSchedule
from threefold.launch.worker_pool import WorkerError
from threefold.models.sharding import ModelPlan
from threefold.parallel import gradients as data
from threefold.parallel import parallelize
from threefold.parallel.pipeline import partition as placement
from threefold.parallel.pipeline import runner, scheduled_stage, schedules, stage

pytestmark = pytest.mark.slow  # they test the tests; the quick run has those of the other two files


Store = schedules.DeferredGradients


def weight_gradients_dropped() -> list[Patch]:
    return [(Store, "_add_all", lambda self, entries: None)]


def weight_gradients_after_the_optimizer() -> list[Patch]:
    """Run at the start of the next step, which clears the gradients first."""
    late: list[Any] = []
    work_off, collecting = Store._add_all, Store.collecting

    def collecting_late(self: Store, add: Any) -> Any:
        self._add = add
        for entries in late:
            work_off(self, entries)
        late.clear()
        return collecting(self, add)

    return [
        (Store, "_add_all", lambda self, entries: late.append(entries)),
        (Store, "collecting", collecting_late),
    ]


def last_micro_batch_not_worked_off() -> list[Patch]:
    work_off = scheduled_stage.ScheduledStage.backward_weight_one_chunk

    def skip_last(self: scheduled_stage.ScheduledStage, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if last_backward:
            self.dw_runner[bwd_chunk_id] = partial(_forget, self.dw_runner[bwd_chunk_id])
        work_off(self, bwd_chunk_id, last_backward)

    return [(scheduled_stage.ScheduledStage, "backward_weight_one_chunk", skip_last)]


def _forget(run: Any) -> None:
    with patched([(Store, "_add_all", lambda self, entries: None)]):
        run()


def bias_gradient_forgotten() -> list[Patch]:
    defer = Store.defer
    return [(Store, "defer", lambda self, leaf, make: defer(self, leaf, make) if leaf.dim() > 1 else None)]


def first_and_last_stage_on_different_ranks() -> list[Patch]:
    def looped(self: TorchSchedule, pp: int, chunks: int) -> tuple[int, ...]:
        return tuple(stage % pp for stage in range(pp * chunks))

    return [(TorchSchedule, "stage_ranks", looped)]


def layer_dropped_at_the_end_of_a_stage() -> list[Patch]:
    layers = placement.StageMap.layers

    def one_less(self: placement.StageMap, stage: int) -> tuple[int, int]:
        first, end = layers(self, stage)
        return first, end - 1 if stage == 0 else end

    return [(placement.StageMap, "layers", one_less)]


def replicas_summed_at_the_first_use_of_a_tied_weight() -> list[Patch]:
    begin = data.GradientBuckets.begin
    # Half of what arrives: the embedding's and the head's, each once a micro-batch.
    return [(data.GradientBuckets, "begin", lambda self, arrivals: begin(self, 2))]


def tied_weight_of_a_rank_in_two_copies() -> list[Patch]:
    return [(parallelize, "_further_uses", lambda stages: [])]


def third_use_forgotten() -> list[Patch]:
    groups = ModelPlan.tied_groups
    return [(ModelPlan, "tied_groups", lambda self: [group[:2] for group in groups(self)])]


def ties_of_borrowers_alone_forgotten() -> list[Patch]:
    """Two uses on a rank that does not hold the owner."""
    further_uses = parallelize._further_uses

    def owners_only(stages: Any) -> Any:
        held = {name for stage in stages for name, _ in stage.named_parameters(remove_duplicate=False)}
        return further_uses(stages) if "blocks.1.mlp.up.weight" in held else []

    return [(parallelize, "_further_uses", owners_only)]


def micro_batches_of_the_labels_reversed() -> list[Patch]:
    batch = stage.LocalBatch

    def reversed_labels(self: Any, run: Any, given: Any, scale: float) -> Tensor:
        return loss(self, run, batch(given.tokens, given.labels.flip(0), given.samples), scale)

    loss = runner.PipelineRunner._run_micro_batches
    return [(runner.PipelineRunner, "_run_micro_batches", reversed_labels)]


ZERO_BUBBLE = {"schedule": "zero-bubble", "pp": 2, "accumulation": 4}
V = {"schedule": "zbv", "pp": 2, "accumulation": 4}
LOOPED = {"schedule": "interleaved", "pp": 2, "accumulation": 4}

MISTAKES = [
    (weight_gradients_dropped, ZERO_BUBBLE, "grad blocks"),
    (weight_gradients_dropped, V, "grad"),
    (weight_gradients_dropped, V | {"schedule": "dualpipev"}, "grad"),
    (weight_gradients_after_the_optimizer, ZERO_BUBBLE, "grad blocks"),
    (last_micro_batch_not_worked_off, ZERO_BUBBLE, "grad blocks"),
    (last_micro_batch_not_worked_off, V, "grad blocks"),
    (bias_gradient_forgotten, V, "bias"),
    (layer_dropped_at_the_end_of_a_stage, LOOPED, "grad"),
    (replicas_summed_at_the_first_use_of_a_tied_weight, V | {"dp": 2}, "grad"),
    (tied_weight_of_a_rank_in_two_copies, {"tp": 2, "schedule": "1f1b"}, "embed.tokens.weight"),
    (micro_batches_of_the_labels_reversed, LOOPED, "loss"),
    (logged_loss_of_the_last_rank, V, "loss"),
    (logged_loss_of_the_first_stage, LOOPED, "loss"),
    (logged_loss_of_the_last_micro_batch, ZERO_BUBBLE, "loss"),
    (logged_loss_of_the_last_micro_batch, V, "loss"),
]


UNSET = (tied_weight_of_a_rank_in_two_copies, third_use_forgotten, ties_of_borrowers_alone_forgotten)
"""Mistakes that train weights which nothing was drawn for or copied to: these hold what the memory held before, which
may be no finite numbers."""


@pytest.mark.parametrize(
    ("mistake", "layout", "sign"), MISTAKES, ids=[f"{each.__name__}-{where['schedule']}" for each, where, _ in MISTAKES]
)
def test_mistake_is_found(pool, expected, mistake: Any, layout: dict[str, Any], sign: str) -> None:
    case = Case(dtype="fp64", layers=4, dropout=0.1, steps=2, **layout)
    if mistake is replicas_summed_at_the_first_use_of_a_tied_weight:  # with shared memory no sum begins before its end
        case = replace(case, shared_memory=False)
    traces = _traces_unless_diverged(pool, case, mistake, in_layout)
    found = traces and departures(expected(case), traces, case)
    assert found is None or any(sign in departure for departure in found), found[:5]


@pytest.mark.parametrize("layout", [V | {"dp": 2}], ids=str)
def test_without_a_mistake_nothing_is_found(pool, expected, layout: dict[str, Any]) -> None:
    case = Case(dtype="fp64", layers=4, dropout=0.1, steps=2, **layout)
    assert not departures(expected(case), pool.run(case.world_size, with_mistake, list, in_layout, case), case)


@pytest.mark.parametrize(
    ("mistake", "tp", "bounds"),
    [(third_use_forgotten, 1, (3, 5, 7)), (ties_of_borrowers_alone_forgotten, 2, (3,))],
    ids=["third-use", "borrowers-alone"],
)
def test_mistake_with_three_tied_layers_is_found(pool, mistake: Any, tp: int, bounds: tuple[int, ...]) -> None:
    settings = (("parallel.partition", bounds),)
    case = Case(dtype="fp64", layers=7, steps=2, settings=settings).with_layout(1, tp, len(bounds) + 1)
    traces = _traces_unless_diverged(pool, case, mistake, tied_model.in_layout)
    found = traces and departures(pool.run(1, tied_model.one_process, case.unsplit)[0], traces, case)
    assert found is None or any("blocks.1.mlp" in departure for departure in found), found[:5]


def _traces_unless_diverged(pool, case: Case, mistake: Any, run: Any) -> Any:
    """Return the traces of the ranks, or None if a mistake of `UNSET` is found by the error that training diverged."""
    try:
        return pool.run(case.world_size, with_mistake, mistake, run, case)
    except WorkerError as error:
        if mistake not in UNSET or "Training diverged at step" not in str(error):
            raise
        return None


def test_a_placement_that_is_not_the_schedules_fails(pool) -> None:
    case = Case(layers=4, steps=1, **V)
    with pytest.raises(WorkerError):
        pool.run(2, with_mistake, first_and_last_stage_on_different_ranks, in_layout, case)

"""An exact run with ZeRO has the bits of one process, whatever its stage and its number of shards."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.exact import CASE, EXACT, check, differences, exact_run, same_bits, slow_but, with_layout
from tests.support.mistakes import Patch, with_mistake
from tests.support.parity import Case, Trace
from tests.support.sweep import sweep
from tests.train.support import Run, losses_of, steps_of, train_rank
from threefold.checkpoint.tensors import load_tensors, stored_tensors
from threefold.comm.axis import Axis
from threefold.launch.worker_pool import WorkerPool
from threefold.parallel.gradient_sums import LeafOrder
from threefold.parallel.zero import ExactShardedGradients, ShardedGradients

SP: dict[str, Any] = {"parallel__sequence_parallel": True}

LAYOUTS = {
    "1 dp 2": with_layout(CASE, 2, 1, 1, parallel__zero=1),
    "2 dp 4": with_layout(CASE, 4, 1, 1, micro=2, parallel__zero=2),
    "3 dp 8": with_layout(CASE, 8, 1, 1, parallel__zero=3),
    "3 dp 2 recompute": with_layout(CASE, 2, 1, 1, parallel__zero=3, train__recompute="full"),
    "1 dp 4 over 2": with_layout(CASE, 4, 1, 1, parallel__zero=1, parallel__zero_shards=2),
    "3 dp 8 over 2": with_layout(CASE, 8, 1, 1, parallel__zero=3, parallel__zero_shards=2),
    "2 dp 8 over 4": with_layout(CASE, 8, 1, 1, parallel__zero=2, parallel__zero_shards=4),
    "3 dp 2 tp 2": with_layout(CASE, 2, 2, 1, parallel__zero=3),
    "2 dp 2 tp 4 sp": with_layout(CASE, 2, 4, 1, parallel__zero=2, train__recompute="selective", **SP),
    "1 dp 2 pp 2": with_layout(CASE, 2, 1, 2, micro=2, parallel__zero=1),
    "2 dp 2 pp 3": with_layout(CASE, 2, 1, 3, parallel__zero=2),
    "3 dp 2 interleaved": with_layout(CASE, 2, 1, 2, "interleaved", parallel__zero=3),
    "3 dp 2 tp 2 pp 2": with_layout(CASE, 2, 2, 2, parallel__zero=3, train__recompute="full"),
    "2 dp 4 over 2 tp 2 sp": with_layout(CASE, 4, 2, 1, parallel__zero=2, parallel__zero_shards=2, **SP),
}


@pytest.mark.parametrize("name", slow_but(LAYOUTS, "1 dp 4 over 2", sweep=[*LAYOUTS][::2]))
def test_bits_are_those_of_one_process(pool: WorkerPool, one_process: Callable[[Case], Trace], name: str) -> None:
    check(pool, one_process(CASE), LAYOUTS[name])


def samples_added_in_a_chain() -> list[Patch]:
    """As FSDP does."""
    return [(LeafOrder, "group", 0)]


def distant_replicas_added_first() -> list[Patch]:
    reduce_scatter, over_shards = ExactShardedGradients._reduce_scatter, Axis.reduce_scatter

    def swapped(self: ExactShardedGradients, leaves: Any) -> None:
        def over_both(axis: Axis, tensor: torch.Tensor, dim: int) -> torch.Tensor:
            return over_shards(axis, self._zero.replicas.all_reduce_(tensor), dim)

        with patch.object(Axis, "reduce_scatter", over_both):
            reduce_scatter(self, leaves)

    return [
        (ExactShardedGradients, "_reduce_scatter", swapped),
        (ExactShardedGradients, "_sum_over_replicas", lambda self: None),
    ]


def tied_weight_not_updated_with_the_first() -> list[Patch]:
    follow, calls = ExactShardedGradients.weights_changed, []

    def only_at_first(self: ExactShardedGradients) -> None:
        calls.append(self)
        (follow if len(calls) == 1 else ShardedGradients.weights_changed)(self)

    return [(ExactShardedGradients, "weights_changed", only_at_first)]


MISTAKES = [
    (samples_added_in_a_chain, "1 dp 2", "gradient of step 0"),
    (distant_replicas_added_first, "1 dp 4 over 2", "gradient of step 0"),
    (tied_weight_not_updated_with_the_first, "3 dp 2 tp 2", "loss of step 1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "layout", "sign"), MISTAKES)
def test_mistake_is_found(
    pool: WorkerPool,
    one_process: Callable[[Case], Trace],
    mistake: Callable[[], list[Patch]],
    layout: str,
    sign: str,
) -> None:
    case = LAYOUTS[layout]
    found = pool.run(case.world_size, with_mistake, mistake, exact_run, case)
    assert differences(one_process(CASE), found[0])[0].startswith(sign)


WHOLE, SAVED = 6, 3
EXACT_RUN = (EXACT, ("model.vocab_size", 304), ("log.every", 1), ("checkpoint.every", SAVED), ("checkpoint.keep", 0))


@pytest.fixture(scope="module")
def unbroken(pool: WorkerPool, small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in one process, with a checkpoint at its end."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    pool.run(1, train_rank, small_run.but(steps=WHOLE, set=EXACT_RUN), folder)
    return folder


@sweep("stage", [0, 1], slow=(1,))
def test_change_of_layout_leaves_no_trace(
    pool: WorkerPool, small_run: Run, unbroken: Path, tmp_path: Path, stage: int
) -> None:
    folder = tmp_path / "run"
    run = small_run.but(steps=WHOLE, set=EXACT_RUN)
    pool.run(4, train_rank, run.but(dp=4, steps=SAVED, set=(*EXACT_RUN, ("parallel.zero", 3))), folder)
    pool.run(4, train_rank, run.but(dp=2, tp=2, set=(*EXACT_RUN, ("parallel.zero", stage))), folder, True)
    assert len(losses_of(folder)) == WHOLE
    for key in ("loss", "grad_norm"):
        assert numbers_of(folder, key) == numbers_of(unbroken, key)
    expected = tensors_of(unbroken)
    found = tensors_of(folder)
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not same_bits(tensor, expected[name])] == []


MIXTURE_RUN = (
    *EXACT_RUN,
    ("model.architecture", "llama"),
    ("model.num_experts", 4),
    ("model.expert_capacity_factor", 1.0),
    ("model.router_aux_loss", 0.1),
)


@pytest.mark.slow
def test_change_of_the_layout_of_a_mixture_leaves_no_trace(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run, whole, changed = small_run.but(steps=WHOLE, set=MIXTURE_RUN), tmp_path / "whole", tmp_path / "changed"
    pool.run(1, train_rank, run, whole)
    first, then = ((*MIXTURE_RUN, ("parallel.zero", stage), ("parallel.ep", 2)) for stage in (3, 1))
    pool.run(4, train_rank, run.but(dp=4, steps=SAVED, set=first), changed)
    pool.run(4, train_rank, run.but(dp=2, tp=2, set=then), changed, True)
    for key in ("loss", "grad_norm", "fingerprint"):
        assert numbers_of(changed, key) == numbers_of(whole, key)


def numbers_of(run_dir: Path, key: str) -> list[Any]:
    return [line[key] for line in steps_of(run_dir).values()]


def tensors_of(run_dir: Path) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / f"step_{WHOLE:08d}"
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in stored_tensors(folder).items()}
    load_tensors(tensors, folder, alone=True)
    return tensors

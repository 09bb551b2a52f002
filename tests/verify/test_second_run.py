"""What verifying sees of a long run, and at the bounds of pieces: each mistake, put back on purpose, is found."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.mistakes import Patch
from tests.support.sweep import sweep
from tests.verify.support import MistakenPool, config, task, verify
from threefold.constants import IGNORE_INDEX
from threefold.huggingface import export_hf
from threefold.parallel import context, zero
from threefold.parallel import gradients as grad_buckets
from threefold.train import optim, optimizers, step, step_batch
from threefold.verify import rank_worker as second_run
from threefold.verify.rank_worker import CHECKS, EXPORT, MIXED, MOVED, OVERFLOW, RESUMED
from threefold.verify.verifier import DEPARTS, EQUAL

SEEN_AT_ONCE = ""
"""In the first run."""


def clip_by_the_squared_coefficient() -> list[Patch]:
    scale = grad_buckets.GradientBuckets.scale_
    return [(grad_buckets.GradientBuckets, "scale_", lambda self, factor: scale(self, factor**2))]


def only_the_first_bucket_is_summed() -> list[Patch]:
    start = grad_buckets.GradientBuckets._start

    def first_alone(self: grad_buckets.GradientBuckets, bucket: Any) -> None:
        start(self, bucket)
        if bucket is not self._buckets[0]:
            bucket.work = None

    return [(grad_buckets.GradientBuckets, "_start", first_alone)]


def large_tensors_are_not_in_the_norm() -> list[Patch]:
    squared = optim.squared_norm

    def of_small(tensors: list[Tensor], piece: int) -> Tensor:
        small = [tensor for tensor in tensors if tensor.numel() < piece]
        return squared(small, piece) if small else torch.zeros((), dtype=torch.float64)

    return [(optim, "squared_norm", of_small)]


def gathered_weights_are_kept() -> list[Patch]:
    return [(zero.ShardedGradients, "weights_changed", lambda self: None)]


def overflow_that_another_rank_counts_is_unseen() -> list[Patch]:
    return [(step.GradientNorm, "squared_or_overflow", step.GradientNorm.squared)]


def good_steps_are_not_restored() -> list[Patch]:
    restore = second_run.restore_engine

    def restored(engine: Any, checkpoint: Any) -> None:
        restore(engine, checkpoint)
        engine.loss_scale.good_steps = 0

    return [(second_run, "restore_engine", restored)]


def optimizer_state_is_not_saved() -> list[Patch]:
    tensors = second_run.checkpoint_tensors

    def cleared(engine: Any) -> dict[str, Tensor]:
        found = tensors(engine)
        return {name: value if name.startswith("model.") else value * 0 for name, value in found.items()}

    return [(second_run, "checkpoint_tensors", cleared)]


def replicas_draw_the_same_masks() -> list[Patch]:
    keys = step_batch.sample_keys
    return [(step_batch, "sample_keys", lambda seed, step, rows: keys(seed, step, rows - rows[0]))]


def documents_are_ignored() -> list[Patch]:
    local = step_batch.BatchPreparation.local_batch

    def across(self: Any, batch: Any, *rest: Any) -> Any:
        return local(self, replace(batch, documents=None), *rest)

    return [(step_batch.BatchPreparation, "local_batch", across)]


def evaluation_scales_the_gradients() -> list[Patch]:
    evaluate = step.GradientStep.eval_batch

    def scaling(self: Any, *rest: Any) -> Any:
        self.gradients.scale_(1.01)
        return evaluate(self, *rest)

    return [(step.GradientStep, "eval_batch", scaling)]


def tokens_of_own_replica_are_logged() -> list[Patch]:
    compute = step.Engine.compute_gradients

    def own(self: Any, batch: Any, *rest: Any) -> tuple[Tensor, int]:
        term, _ = compute(self, batch, *rest)
        return term, int((batch.labels != IGNORE_INDEX).sum())

    return [(step.Engine, "compute_gradients", own)]


def padding_of_own_replica_counts_for_the_throughput() -> list[Patch]:
    count = step_batch.BatchPreparation._count

    def own(self: Any, batch: Any) -> tuple[int, int]:
        return count(self, batch)[0], int(batch.padding.sum())

    return [(step_batch.BatchPreparation, "_count", own)]


def rate_of_the_next_update_is_logged() -> list[Patch]:
    update = step.Engine.update

    def late(self: Any, loss: Tensor, tokens: int, number: int) -> step.StepResult:
        result = update(self, loss, tokens, number)
        return replace(result, lr=step.learning_rate(number + 2, self.config.optimizer))

    return [(step.Engine, "update", late)]


def samples_are_read_twice_after_resuming() -> list[Patch]:
    consumed = second_run.consumed_by

    def twice(checkpoint: Any, config: Any) -> Any:
        found = consumed(checkpoint, config)
        return replace(found, samples=found.samples - found.per_step)

    return [(second_run, "consumed_by", twice)]


def an_update_too_many_is_restored() -> list[Patch]:
    restore = second_run.restore_engine

    def restored(engine: Any, checkpoint: Any) -> None:
        restore(engine, checkpoint)
        for _, name, value in engine.optimizer.states():
            if name == "step":
                value += 1

    return [(second_run, "restore_engine", restored)]


def an_export_swaps_two_layers() -> list[Patch]:
    load = export_hf.load_tensors

    def swapped(tensors: dict[str, Tensor], *rest: Any, **options: Any) -> None:
        load(tensors, *rest, **options)
        first, last = (tensors[f"model.blocks.{number}.mlp.up.weight"] for number in (0, 1))
        first.copy_(last)

    return [(export_hf, "load_tensors", swapped)]


def the_first_chunk_forgets_the_window() -> list[Patch]:
    of_chunk = context.of_chunk

    def forgetful(core: Any, heads: Any, queries: Any) -> Any:
        attention = of_chunk(core, heads, queries)
        attention.window = core.window if queries.number else 0
        return attention

    return [(context, "of_chunk", forgetful)]


def muon_knows_one_scaling() -> list[Patch]:
    step = optimizers.Muon.step

    def scaled(self: optimizers.Muon, lr: float) -> None:
        self.config = self.config.model_copy(update={"lr_scaling": "match_rms_adamw"})
        step(self, lr)

    return [(optimizers.Muon, "step", scaled)]


WINDOW = {"model": {"architecture": "llama", "sliding_window": 256}}  # of a sequence of 512, whose chunks are of 128
MUON = {"optimizer": {"name": "muon", "lr": 0.02}}

MISTAKES = [
    (clip_by_the_squared_coefficient, "dp2", SEEN_AT_ONCE, "clipped gradient"),
    (only_the_first_bucket_is_summed, "dp2", SEEN_AT_ONCE, "gradient"),
    (large_tensors_are_not_in_the_norm, "dp2", SEEN_AT_ONCE, "gradient norm"),
    (gathered_weights_are_kept, "dp2 zero1", SEEN_AT_ONCE, "gradient"),
    (evaluation_scales_the_gradients, "dp2", SEEN_AT_ONCE, "gradient"),
    (replicas_draw_the_same_masks, "dp2", MIXED, "gradient"),
    (documents_are_ignored, "cp2", MIXED, "gradient"),
    (overflow_that_another_rank_counts_is_unseen, "dp2", OVERFLOW, "loss scale"),
    (good_steps_are_not_restored, "dp2", RESUMED, "loss scale"),
    (optimizer_state_is_not_saved, "dp2", RESUMED, "count of updates"),
    (tokens_of_own_replica_are_logged, "dp2", SEEN_AT_ONCE, "valid tokens"),
    (padding_of_own_replica_counts_for_the_throughput, "dp2", SEEN_AT_ONCE, "tokens read"),
    (rate_of_the_next_update_is_logged, "tp2", SEEN_AT_ONCE, "learning rate"),
    (samples_are_read_twice_after_resuming, "dp2", RESUMED, "samples consumed"),
    (an_update_too_many_is_restored, "dp2", RESUMED, "count of updates"),
    (an_export_swaps_two_layers, "tp2", EXPORT, "exported weight"),
]


@sweep(
    ("mistake", "layout", "check", "what"),
    MISTAKES,
    ids=[each[0].__name__ for each in MISTAKES],
    quick=(0, 8, 10, 15),
)
def test_mistake_is_found(pool, tmp_path: Path, mistake, layout: str, check: str, what: str) -> None:
    [result] = verify(MistakenPool(pool, mistake), task(layout), tmp_path, layout)
    assert result.verdict == DEPARTS, result.message
    assert result.first is not None
    assert result.first.check == check
    if what != "loss scale":  # a rank that updates spoils its weights too
        assert result.first.what == what


@pytest.mark.parametrize(
    ("mistake", "layout", "sections", "what"),
    [
        (the_first_chunk_forgets_the_window, "cp2", WINDOW, "gradient"),
        pytest.param(muon_knows_one_scaling, "tp2", MUON, "weight", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_at_settings_that_the_config_does_not_have_is_found(
    pool, tmp_path: Path, mistake, layout: str, sections: dict[str, Any], what: str
) -> None:
    """The second run has a window that ends inside a context chunk, and Muon's other scale."""
    todo = task(layout, given=config(**sections))
    for folder in ("right", "wrong"):
        (tmp_path / folder).mkdir()
    [result] = verify(pool, todo, tmp_path / "right", layout)
    assert result.verdict == EQUAL, (result.first, result.message)
    [result] = verify(MistakenPool(pool, mistake), todo, tmp_path / "wrong", layout)
    assert result.first is not None
    assert (result.verdict, result.first.check, result.first.what) == (DEPARTS, MIXED, what)


@sweep("dtype", ["fp64", "fp32"], slow=(1,))
def test_every_check_is_made_and_is_in_the_document(pool, tmp_path: Path, dtype: str) -> None:
    todo = task("dp2·tp2", dtype=dtype)
    [result] = verify(pool, todo, tmp_path, "dp2·tp2")
    assert result.verdict == EQUAL, (result.first, result.message)
    checks = result.to_json()["checks"]
    assert tuple(checks) == CHECKS
    assert all(0 < relative <= todo.tolerance for relative in checks.values()), checks


@pytest.mark.slow
def test_a_run_without_a_clip_stays_without(pool, tmp_path: Path) -> None:
    given = config(optimizer={"clip_grad_norm": 0.0})
    [result] = verify(pool, task("dp2", given=given), tmp_path, "dp2")
    assert result.verdict == EQUAL


def test_a_model_of_full_size_has_no_second_run() -> None:
    todo = task("dp2")
    assert todo.second is not None
    assert todo.second.config.data.separate_documents
    assert todo.second.config.model.hidden_dropout == 0.1
    assert todo.second.config.model.attention_dropout == 0.0
    assert replace(todo, thorough=True).second.config.model.attention_dropout == 0.1
    assert replace(todo, full=True).second is None
    assert MOVED in CHECKS

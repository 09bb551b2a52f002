"""What verifying sees of a long run, and at the bounds of pieces: each mistake, put back on purpose, is found."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.support.mistakes import Patch
from tests.support.sweep import sweep
from tests.verify.support import MistakenPool, config, task, verify
from threefold.huggingface import export_hf
from threefold.train import step, step_batch
from threefold.verify import rank_worker as second_run
from threefold.verify.rank_worker import CHECKS, EXPORT, MIXED, MOVED, OVERFLOW, RESUMED
from threefold.verify.verifier import DEPARTS, EQUAL


def overflow_that_another_rank_counts_is_unseen() -> list[Patch]:
    squares = step.GradientUpdate.local_squares
    return [(step.GradientUpdate, "local_squares", lambda self: squares(self)[:-1])]


def optimizer_state_is_not_saved() -> list[Patch]:
    tensors = second_run.checkpoint_tensors

    def cleared(engine: Any) -> dict[str, Tensor]:
        found = tensors(engine)
        return {name: value if name.startswith("model.") else value * 0 for name, value in found.items()}

    return [(second_run, "checkpoint_tensors", cleared)]


def replicas_draw_the_same_masks() -> list[Patch]:
    keys = step_batch.sample_keys
    return [(step_batch, "sample_keys", lambda seed, step, rows: keys(seed, step, rows - rows[0]))]


def an_export_swaps_two_layers() -> list[Patch]:
    load = export_hf.load_tensors

    def swapped(tensors: dict[str, Tensor], *rest: Any, **options: Any) -> None:
        load(tensors, *rest, **options)
        first, last = (tensors[f"model.blocks.{number}.mlp.up.weight"] for number in (0, 1))
        first.copy_(last)

    return [(export_hf, "load_tensors", swapped)]


MISTAKES = [
    (replicas_draw_the_same_masks, "dp2", MIXED, "gradient"),
    (overflow_that_another_rank_counts_is_unseen, "dp2", OVERFLOW, ""),  # a rank that updates spoils its weights too
    (optimizer_state_is_not_saved, "dp2", RESUMED, "count of updates"),
    (an_export_swaps_two_layers, "tp2", EXPORT, "exported weight"),
]
"""One for each check; the catalogue has others."""


@sweep(
    ("mistake", "layout", "check", "what"),
    MISTAKES,
    ids=[each[0].__name__ for each in MISTAKES],
    quick=(0, 3),
)
def test_mistake_is_found(pool, tmp_path: Path, mistake, layout: str, check: str, what: str) -> None:
    [result] = verify(MistakenPool(pool, mistake), task(layout), tmp_path, layout)
    assert result.verdict == DEPARTS, result.message
    assert result.first is not None
    assert result.first.check == check
    assert result.first.what == (what or result.first.what)


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

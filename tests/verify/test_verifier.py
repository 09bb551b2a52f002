"""Verifying itself: what is equal passes, and a mistake of each kind is found and placed."""

from pathlib import Path

import pytest
import torch

from tests.support import mistakes
from tests.support.sweep import sweep
from tests.verify.support import LAYOUTS, MistakenPool, config, task, verify
from threefold.constants import IGNORE_INDEX
from threefold.verify.batches import RandomBatches
from threefold.verify.compare import Comparison, Held, coverage
from threefold.verify.reference import Trace
from threefold.verify.verifier import DEPARTS, EQUAL, FAILED

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


@sweep("dtype", ["fp64", "fp32"], quick=(1,))
@sweep("optimizer", ["adamw", "sgd"], quick=(0,), slow=())
def test_layouts_are_equal(pool, tmp_path: Path, dtype: str, optimizer: str) -> None:
    given = config(model=DROPOUT, optimizer={"name": optimizer})
    todo = task(*LAYOUTS, dtype=dtype, given=given)
    for result in verify(pool, todo, tmp_path, *LAYOUTS):
        assert result.verdict == EQUAL, (str(result.spec), result.worst, result.message)
        assert result.worst is not None
        assert 0 < result.worst.relative <= todo.tolerance  # different orders of summing: never all bits the same


@pytest.mark.parametrize("rows", [2, 4, 6, 8, 24])
def test_first_and_last_rows_have_labels_and_another_has_none(rows: int) -> None:
    """Each may be a micro-batch; without labels its gradient would be zero, and a mistake that loses it not seen."""
    small = task("dp2").config
    train = small.train.model_copy(update={"global_batch_size": rows})
    batch = RandomBatches().batch(small.model_copy(update={"train": train}), 0)
    counts = (batch.labels != IGNORE_INDEX).sum(1).tolist()
    assert counts[0] > 0 < counts[-1]
    assert max(counts) == batch.labels.shape[1]
    assert (min(counts) == 0) == (rows > 3)


MISTAKES = [
    (mistakes.column_input_gradient_not_summed, "tp2", "gradient", 1),
    (mistakes.shards_seeded_alike, "tp2", "initial weight", 0),
    (mistakes.mean_of_means, "dp2", "valid tokens", 1),
    (mistakes.tied_weight_counted_twice_in_the_norm, "pp2", "gradient norm", 1),
    (mistakes.logged_loss_of_one_replica, "dp2", "loss", 1),
    (mistakes.biases_decayed, "dp2", "weight", 1),
]


@sweep(("mistake", "layout", "what", "step"), MISTAKES, ids=[each[0].__name__ for each in MISTAKES], quick=(0, 2, 4))
def test_mistake_is_found_and_placed(pool, tmp_path: Path, mistake, layout: str, what: str, step: int) -> None:
    todo = task(layout, given=config(model=DROPOUT))
    [result] = verify(MistakenPool(pool, mistake), todo, tmp_path, layout)
    assert result.verdict == DEPARTS
    assert result.first is not None
    assert (result.first.what, result.first.step) == (what, step)


def test_departure_names_parameter_stage_shard_and_the_layer_to_look_at(pool, tmp_path: Path) -> None:
    todo = task("tp2·pp2")
    [result] = verify(MistakenPool(pool, mistakes.column_input_gradient_not_summed), todo, tmp_path, "tp2·pp2")
    assert result.first is not None
    assert str(result.first) == "gradient of embed.tokens.weight, step 1"
    assert result.first.where(result.spec.layout) == "stage 0, tp shard 0 of 2, rank 0"
    # The head's own weight is right, its input's gradient is not: the last norm is the first to get it.
    assert result.nearest_to_loss in ("head.norm.weight", "head.norm.bias")
    assert "blocks.0.mlp.up.weight" in result.departing


def test_departure_in_single_precision(pool, tmp_path: Path) -> None:
    """Adam's final weights allow for its division by small numbers, and still show a decay too much."""
    todo = task("dp2", dtype="fp32")
    [result] = verify(MistakenPool(pool, mistakes.biases_decayed), todo, tmp_path, "dp2")
    assert result.first is not None
    assert result.first.what == "weight"
    assert result.first.parameter.endswith("norm.weight")  # biases are zero at first, and hardly decay


def dies() -> list[mistakes.Patch]:
    import os
    import signal

    from threefold.train.step import Engine

    def update(self: Engine, *rest: object) -> None:
        if self.mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.mesh.world.gather_objects(None)  # the others wait for it

    return [(Engine, "update", update)]


def raises() -> list[mistakes.Patch]:
    from threefold.train.step import Engine

    def update(self: Engine, *rest: object) -> None:
        raise ValueError("the shapes\ndo not fit")

    return [(Engine, "update", update)]


@sweep(
    ("mistake", "message"),
    [
        (dies, "rank 1 failed: its process ended, killed by SIGKILL"),
        (raises, "failed: ValueError: the shapes do not fit"),
    ],
    slow=(0,),
)
def test_layout_that_fails_is_a_verdict_and_the_others_go_on(pool, tmp_path: Path, mistake, message: str) -> None:
    todo = task("dp2", "tp2")
    [failed] = verify(MistakenPool(pool, mistake), todo, tmp_path, "dp2")
    assert failed.verdict == FAILED
    assert message in failed.message
    [fine] = verify(pool, todo, tmp_path, "tp2")
    assert fine.verdict == EQUAL


def test_elements_that_nobody_or_two_hold() -> None:
    shapes = {"w": (4, 2)}
    upper, lower = Held("w", 0, (0, 0), (2, 2)), Held("w", 0, (2, 0), (2, 2))
    assert coverage([[upper], [lower], [lower]], shapes) is None
    assert "hold 4 different elements of w, which has 8" in str(coverage([[upper], [upper]], shapes))
    assert "hold extra" in str(coverage([[Held("extra", 0, (), ())]], shapes))


def test_comparison_cannot_pass_what_is_not_a_number() -> None:
    one = torch.ones(2)
    trace = Trace({"w": one}, [1.0], [1.0], [{"w": one}], [{"w": one}], {"w": one})
    comparison = Comparison(trace, {"w": Held("w", 0, (0,), (2,))}, 0)
    comparison.gradients(0, {"w": torch.tensor([1.0, float("nan")])})
    comparison.scalars(0, float("nan"), 1.0)
    assert [error.relative for error in comparison.errors] == [float("inf"), float("inf"), 0.0]


@pytest.mark.parametrize(
    ("expected", "got", "is_equal"),
    [
        ([1.0, -torch.inf], [1.0, -torch.inf], True),
        ([1.0, -torch.inf], [1.0, torch.inf], False),
        ([1.0, -torch.inf], [1.0, 5.0], False),
        ([1.0, torch.nan], [1.0, torch.nan], False),
        ([1.0, torch.nan], [1.0, 5.0], False),
    ],
    ids=str,
)
def test_buffers_are_equal_up_to_the_infinities_of_a_mask(expected: list, got: list, is_equal: bool) -> None:
    trace = Trace({}, [], [], [], [], {}, buffers=[{"mask": torch.tensor(expected)}])
    comparison = Comparison(trace, {}, 0)
    comparison.buffers(0, {"mask": torch.tensor(got)})
    assert [error.relative for error in comparison.errors] == [0.0 if is_equal else float("inf")]

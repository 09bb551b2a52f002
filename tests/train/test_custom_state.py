"""What a custom model keeps beside its weights: buffers that forward updates, and generators that it draws from."""

import random
import re
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.support.custom_state_models import WIDTH, Model, Sums, loss
from tests.train.support import Run, losses_of, micro_batches, run_of, steps_of, train_rank
from threefold.checkpoint.folder import newest
from threefold.checkpoint.tensors import load_tensors, stored_tensors
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.parallel.parallelize import TrainingSettings
from threefold.random.rng import ProcessGenerators, generators_preserved
from threefold.train.step import GradientStep
from threefold.verify.worker_pool import WorkerError


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a run's newest checkpoint whose names are in the model's and the optimizer's parts."""
    checkpoint = newest(folder)
    assert checkpoint is not None
    found = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in stored_tensors(checkpoint.path).items()
        if not name.startswith("random.")
    }
    load_tensors(found, checkpoint.path, alone=True)
    return found


def drawn_rank(run: Run, folder: Path, resume: bool = False) -> str:
    """As `train_rank`, in a process that has drawn other numbers before."""
    seed = 100 + resume
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return train_rank(run, folder, resume)


LAYOUTS = ({"dp": 2, "set": micro_batches(2)}, {"tp": 2, "pp": 2}, {"dp": 2, "set": (("parallel.zero", 3),)})


def test_a_running_mean_is_that_of_one_process_and_resumes_bit_for_bit(pool, tmp_path: Path) -> None:
    whole = run_of("tracked", set=micro_batches(1))
    pool.run(1, train_rank, whole, tmp_path / "whole")
    pool.run(1, train_rank, whole.but(steps=2), tmp_path / "parts")
    pool.run(1, train_rank, whole, tmp_path / "parts", True)
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
    expected, got = tensors(tmp_path / "whole"), tensors(tmp_path / "parts")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert expected["model.blocks.1.part.updates"] == 4
    assert "model.blocks.0.part.scratch" not in expected
    assert not torch.equal(expected["model.blocks.0.part.size"], torch.ones(WIDTH))


@pytest.mark.parametrize("layout", LAYOUTS, ids=("dp2 in 2 micro-batches", "tp2 pp2", "dp2 zero3"))
def test_a_running_mean_is_the_same_in_every_layout_and_resumes_in_another(pool, tmp_path: Path, layout: dict) -> None:
    whole = run_of("tracked", set=micro_batches(1))
    other = run_of("tracked", **layout)
    pool.run(1, train_rank, whole, tmp_path / "whole")
    pool.run(other.world_size, train_rank, other.but(steps=2), tmp_path / "parts")
    pool.run(1, train_rank, whole, tmp_path / "parts", True)
    assert losses_of(tmp_path / "parts") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-5)
    expected, got = tensors(tmp_path / "whole"), tensors(tmp_path / "parts")
    assert expected.keys() == got.keys()
    for name in (name for name in expected if ".part." in name and name.startswith("model.")):
        assert torch.allclose(got[name], expected[name], rtol=1e-4, atol=1e-5), name


def test_a_count_of_samples_is_refused_where_there_are_several_replicas(pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as told:
        pool.run(2, train_rank, run_of("samples seen", dp=2), tmp_path / "run")
    assert isinstance(told.value.error, UserError)
    assert re.match(
        r"forward makes something else of the buffer 'blocks.\d.part.seen' for other", str(told.value.error)
    )


def test_recompute_would_update_a_buffer_twice(pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as told:
        pool.run(1, train_rank, run_of("tracked", set=(("train.recompute", "full"),)), tmp_path / "run")
    said = "forward changes the buffer 'blocks.0.part.size', and train.recompute runs it a second time; use none."
    assert str(told.value.error) == said


def test_evaluations_leave_buffers_and_generators_as_they_are(pool, tmp_path: Path) -> None:
    """Two update their buffer in evaluation mode too, one draws there, and one has a part that never trains."""
    for kind in ("running range", "samples seen", "numpy", "evaluated"):
        run = run_of(kind, steps=3, set=micro_batches(1))
        pool.run(1, drawn_rank, run, tmp_path / kind / "plain")
        evaluated = run.but(set=(*run.set, ("train.eval_every", 1), ("train.eval_batches", 2)))
        pool.run(1, drawn_rank, evaluated, tmp_path / kind / "evaluated")
        assert losses_of(tmp_path / kind / "evaluated") == losses_of(tmp_path / kind / "plain")
        expected, found = tensors(tmp_path / kind / "plain"), tensors(tmp_path / kind / "evaluated")
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_buffer_that_a_callback_replaces_is_the_one_that_goes_on() -> None:
    make = partial(Model, kind="tracked")
    with torch.device("meta"):
        plan = Model.plan.build(make())
    step = GradientStep(make, plan, Mesh.alone(), TrainingSettings(micro_batches=1))
    part = step.stages[0].get_submodule("blocks.0.part")
    batch = tuple(torch.stack(each) for each in zip(*(Sums()[row] for row in range(4)), strict=True))
    step.train_batch(batch, 0, loss)
    part.size = torch.full((WIDTH,), 9.0)
    step.train_batch(batch, 1, loss)
    assert part.size.min() > 8


def test_a_skipped_step_leaves_buffers_as_they_were(pool, tmp_path: Path) -> None:
    """Of three steps whose gradients overflow."""
    fp16 = (("precision.dtype", "fp16"), ("precision.loss_scale", 2.0**60))
    pool.run(1, train_rank, run_of("tracked", steps=3, set=(*micro_batches(1), *fp16)), tmp_path)
    assert all(step["skipped"] for step in steps_of(tmp_path).values())
    found = tensors(tmp_path)
    assert found["model.blocks.1.part.updates"] == 0
    assert torch.equal(found["model.blocks.1.part.size"].float(), torch.ones(WIDTH))


@pytest.mark.parametrize("kind", ["F.dropout", "random", "numpy", "drawn attributes", "written data"])
def test_generators_go_on_where_a_run_resumes_in_the_same_layout(pool, tmp_path: Path, kind: str) -> None:
    whole = run_of(kind, set=micro_batches(2))
    pool.run(1, drawn_rank, whole, tmp_path / "whole")
    pool.run(1, drawn_rank, whole.but(steps=2), tmp_path / "parts")
    pool.run(1, drawn_rank, whole, tmp_path / "parts", True)
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")


def test_what_a_run_draws_follows_from_its_seed(pool, tmp_path: Path) -> None:
    """Whatever the process drew before; torch, `random` and `numpy.random` alike."""
    for kind in ("F.dropout", "random", "numpy"):
        run = run_of(kind, steps=2, set=micro_batches(2))
        pool.run(1, drawn_rank, run, tmp_path / kind / "one")
        pool.run(1, train_rank, run, tmp_path / kind / "two")
        assert losses_of(tmp_path / kind / "one") == losses_of(tmp_path / kind / "two")


@pytest.mark.parametrize(
    ("kind", "precision", "sentence"),
    [
        (
            "late buffer",
            "fp32",
            "forward makes 'blocks.0.part.size', which no optimizer, checkpoint or other rank",
        ),
        (
            "normed weight",
            "bf16",
            "forward changes the parameter 'blocks.0.part.gain', and in torch.bfloat16 the",
        ),
    ],
)
def test_what_a_forward_pass_may_not_do(pool, tmp_path: Path, kind: str, precision: str, sentence: str) -> None:
    run = run_of(kind, steps=1, set=(*micro_batches(1), ("precision.dtype", precision)))
    with pytest.raises(WorkerError) as told:
        pool.run(1, train_rank, run, tmp_path / "run")
    assert isinstance(told.value.error, UserError)
    assert str(told.value.error).startswith(sentence)


def test_generators_follow_from_seed_and_step_in_another_layout(pool, tmp_path: Path) -> None:
    """The same numbers whatever the processes drew before, with a warning."""
    run = run_of("random", steps=2, set=micro_batches(2))
    other = run_of("random", steps=4, tp=2)
    for name in ("one", "two"):
        pool.run(1, drawn_rank, run, tmp_path / name)
        [printed, _] = pool.run(2, drawn_rank if name == "one" else train_rank, other, tmp_path / name, True)
        assert "The states of the generators of torch, random and numpy.random belong to another layout" in printed
    assert losses_of(tmp_path / "one") == losses_of(tmp_path / "two")


def test_a_run_that_draws_nothing_stores_no_generators(pool, tmp_path: Path) -> None:
    pool.run(1, train_rank, run_of("plain", steps=1), tmp_path / "run")
    checkpoint = newest(tmp_path / "run")
    assert checkpoint is not None
    assert not [name for name in stored_tensors(checkpoint.path) if name.startswith("random.")]


def first_numbers(run: Run, folder: Path) -> tuple[float, ...]:
    """What a run's generators draw first."""
    found, begin = [], ProcessGenerators.begin

    def begun(self: ProcessGenerators, seed: int) -> None:
        begin(self, seed)
        with generators_preserved():
            found.append((random.random(), float(np.random.rand()), torch.rand(()).item()))

    with patch.object(ProcessGenerators, "begin", begun):
        train_rank(run, folder)
    (numbers,) = found
    return numbers


def test_another_seed_draws_other_numbers(pool, tmp_path: Path) -> None:
    run = run_of("random", steps=1, set=micro_batches(1))
    other = run.but(set=(*run.set, ("train.seed", 5)))
    one, same, two = (
        pool.run(1, first_numbers, each, tmp_path / str(place))[0] for place, each in enumerate((run, run, other))
    )
    assert one == same
    assert all(a != b for a, b in zip(one, two, strict=True))


def test_generators_of_every_rank_go_on(pool, tmp_path: Path) -> None:
    whole = run_of("F.dropout", dp=2, set=micro_batches(2))
    pool.run(2, drawn_rank, whole, tmp_path / "whole")
    pool.run(2, drawn_rank, whole.but(steps=2), tmp_path / "parts")
    pool.run(2, drawn_rank, whole, tmp_path / "parts", True)
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")

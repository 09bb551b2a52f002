"""`threefold checkpoint average`: the mean of a run's latest checkpoints, saved in any layouts."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.command import Command
from tests.train.support import Run, train_rank
from threefold.checkpoint.folder import newest, path_of
from threefold.checkpoint.tensors import load_tensors, stored_tensors
from threefold.verify.worker_pool import WorkerPool


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored_tensors(folder).items()}
    load_tensors(found, folder, alone=True)
    return found


def weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}


EVERY = (("checkpoint.every", 1), ("checkpoint.keep", 4), ("model.vocab_size", None))
LATER = ("parallel.zero", 3)


def test_it_is_the_mean_in_every_layout(threefold: Command, pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """Of checkpoints that several layouts have saved as of those of one process; other commands open it."""
    run = small_run.but(dtype="fp64", steps=5, set=EVERY)
    pool.run(1, train_rank, run, tmp_path / "one")
    pool.run(2, train_rank, run.but(tp=2, steps=3), tmp_path / "several")
    pool.run(4, train_rank, run.but(dp=2, pp=2, steps=4), tmp_path / "several", True)
    pool.run(2, train_rank, run.but(dp=2, set=(*EVERY, LATER)), tmp_path / "several", True)
    found = {}
    for name in ("one", "several"):
        ended = threefold("checkpoint", "average", tmp_path / name, "--latest", "3", "--out", tmp_path / f"of-{name}")
        assert (ended.status, ended.error) == (0, "")
        assert "3, 4, 5" in ended.output
        made = newest(tmp_path / f"of-{name}")
        assert made is not None
        assert made.step == 5
        found[name] = tensors_of(made.path)
    each = [weights(tensors_of(path_of(tmp_path / "one", step))) for step in (3, 4, 5)]
    for name, weight in weights(found["one"]).items():
        mean = torch.stack([tensors[name] for tensors in each]).mean(0)
        scale = 1e-12 * float(mean.abs().max())
        assert torch.allclose(weight, mean, rtol=0, atol=scale)
        assert torch.allclose(found["several"][f"model.{name}"], mean, rtol=0, atol=scale)
        assert not torch.allclose(weight, each[-1][name], rtol=0, atol=scale)
    assert found["one"].keys() == found["several"].keys() == {f"model.{name}" for name in each[0]}
    averaged = tmp_path / "of-several"
    assert threefold("checkpoint", "verify", averaged).status == 0
    assert threefold("generate", averaged, "--prompt", "a", "--max-new-tokens", "2").status == 0
    refused = threefold(
        "train", averaged / "config.yaml", "--run-dir", averaged, "--resume", "--set", "train.max_steps=9"
    )
    assert "has a model and no optimizer state to resume" in refused.error
    begun = run.but(steps=1, tp=2, set=(*EVERY, ("train.init_from", str(averaged))))
    pool.run(2, train_rank, begun, tmp_path / "begun")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sums_are_in_fp64(threefold: Command, pool: WorkerPool, small_run: Run, tmp_path: Path, dtype: str) -> None:
    settings = (*EVERY, *((("precision.master_weights", False),) if dtype == "bf16" else ()))
    pool.run(1, train_rank, small_run.but(dtype=dtype, steps=3, set=settings), tmp_path / "run")
    threefold("checkpoint", "average", tmp_path / "run", "--latest", "3", "--out", tmp_path / "mean")
    made = newest(tmp_path / "mean")
    assert made is not None
    each = [weights(tensors_of(path_of(tmp_path / "run", step))) for step in (1, 2, 3)]
    for name, weight in weights(tensors_of(made.path)).items():
        total = sum((tensors[name].double() for tensors in each), torch.zeros_like(weight, dtype=torch.float64))
        assert weight.equal((total / 3).to(weight.dtype)), name


def test_what_cannot_be_averaged_is_one_sentence(
    threefold: Command, pool: WorkerPool, small_run: Run, tmp_path: Path
) -> None:
    pool.run(1, train_rank, small_run.but(steps=2, set=(*EVERY, ("checkpoint.keep", 1))), tmp_path / "run")
    asked = ("checkpoint", "average", tmp_path / "run", "--out", tmp_path / "out", "--latest")
    assert "has checkpoints of the steps 2; train with a checkpoint.keep of 2." in threefold(*asked, "2").error
    pool.run(1, train_rank, small_run.but(steps=4, set=EVERY), tmp_path / "run", True)
    assert "has checkpoints of the steps 2, 3, 4; use at most 3, or train with" in threefold(*asked, "9").error
    file = path_of(tmp_path / "run", 3) / "tensors-00000.bin"
    damaged = bytearray(file.read_bytes())
    damaged[64] ^= 1
    file.write_bytes(damaged)
    assert "step_00000003" in (said := threefold(*asked, "3").error)
    assert "does not have the checksum" in said or "damaged" in said
    assert not (tmp_path / "out").exists()

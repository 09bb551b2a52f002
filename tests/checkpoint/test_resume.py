"""Half a run, a checkpoint, and the other half in any layout: the losses of the unbroken run."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.sweep import sweep
from tests.support.words import words
from tests.train.support import Run, engine_of, losses_of, manifest, same, train_rank, write_ids
from threefold.checkpoint.folder import newest
from threefold.data.dataset import open_dataset
from threefold.train.state import load_weights, restore_engine
from threefold.verify.worker_pool import WorkerPool

HALF, WHOLE = 3, 6


def broken_run(
    pool: WorkerPool, before: Run, after: Run, folder: Path, half: int = HALF, whole: int = WHOLE
) -> list[float]:
    """Losses of a run that changes from one layout to another half-way; dropout and decay are on.

    It stops by itself after half the steps, so the settings that follow from `train.max_steps` are given in `Run`.
    """
    pool.run(before.world_size, train_rank, before.but(steps=half), folder)
    pool.run(after.world_size, train_rank, after.but(steps=whole), folder, True)
    return losses_of(folder)


@sweep(
    ("dp", "tp", "pp", "optimizer"),
    [(1, 1, 1, "adamw"), (2, 2, 2, "adamw"), (1, 3, 1, "sgd"), (1, 1, 1, "sgd"), (4, 2, 1, "adamw")],
    quick=(0,),
    slow=(1, 2),
)
def test_the_same_layout_goes_on_bit_equal(
    pool: WorkerPool, small_run: Run, tmp_path: Path, dp: int, tp: int, pp: int, optimizer: str
) -> None:
    heads = (("model.num_attention_heads", 6), ("optimizer.name", optimizer))
    run = small_run.but(dp=dp, tp=tp, pp=pp, set=heads)
    half, whole = 2, 4
    pool.run(run.world_size, train_rank, run.but(steps=whole), tmp_path / "unbroken")
    assert broken_run(pool, run, run, tmp_path / "broken", half, whole) == losses_of(tmp_path / "unbroken")
    last = Path("checkpoints") / f"step_{whole:08d}"
    files = sorted((tmp_path / "unbroken" / last).glob("*.bin"))
    assert files
    assert all(file.read_bytes() == (tmp_path / "broken" / last / file.name).read_bytes() for file in files)


@sweep(
    ("before", "after", "dtype"),
    [
        ((2, 2, 2), (1, 1, 1), "fp32"),
        ((1, 1, 1), (1, 4, 2), "fp32"),
        ((2, 1, 2), (1, 4, 1), "fp64"),
        ((1, 4, 1), (1, 1, 3), "fp64"),
        ((4, 1, 1), (1, 2, 2), "fp64"),
    ],
    quick=(1,),
)
def test_another_layout_goes_on_equal(
    pool: WorkerPool, small_run: Run, tmp_path: Path, before: tuple[int, ...], after: tuple[int, ...], dtype: str
) -> None:
    run = small_run.but(dtype=dtype, steps=WHOLE)
    pool.run(1, train_rank, run, tmp_path / "unbroken")
    first, second = (run.but(dp=dp, tp=tp, pp=pp) for dp, tp, pp in (before, after))
    losses = broken_run(pool, first, second, tmp_path / "broken")
    assert same(losses, losses_of(tmp_path / "unbroken"), dtype)


@sweep(
    ("before", "after"),
    [({"tp": 4}, {"pp": 2}), ({"tp": 2}, {"tp": 4}), ({"tp": 2, "dp": 2}, {"tp": 4, "dp": 2})],
    ids=str,
    slow=(0, 1),
)
def test_key_value_heads_on_several_ranks_go_on_equal(
    pool: WorkerPool, small_run: Run, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Four ranks, two of which share each head of keys and values, or two with one each: the same tensors."""
    model = (("model.architecture", "llama"), ("model.num_key_value_heads", 2))
    run = small_run.but(dtype="fp64", steps=WHOLE, set=model)
    pool.run(1, train_rank, run, tmp_path / "unbroken")
    losses = broken_run(pool, run.but(**before), run.but(**after), tmp_path / "broken")
    assert same(losses, losses_of(tmp_path / "unbroken"), "fp64")


def zero(stage: int, **changes: Any) -> dict[str, Any]:
    return {"dp": 2, "set": (("parallel.zero", stage),), **changes}


@sweep(
    ("before", "after"),
    [
        (zero(3, dp=3, tp=2), {"pp": 2}),
        ({"pp": 2}, zero(3, dp=3, tp=2)),
        (zero(1, pp=2), zero(2, tp=2)),
        (zero(2, dp=4, set=(("parallel.zero", 2), ("parallel.zero_shards", 2))), {"dtype": "fp64", "dp": 2}),
    ],
    slow=(0, 1, 3),
    ids=str,
)
def test_shards_of_the_replicas_go_on_equal(
    pool: WorkerPool, small_run: Run, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Also where 301 rows are cut in two by tp and in three by the replicas, which torch itself reckons wrongly."""
    run = small_run.but(dtype="fp64", steps=WHOLE, set=(("train.global_batch_size", 12),))
    pool.run(1, train_rank, run, tmp_path / "unbroken")
    first, second = (run.but(**{**each, "set": run.set + each.get("set", ())}) for each in (before, after))
    assert same(broken_run(pool, first, second, tmp_path / "broken"), losses_of(tmp_path / "unbroken"), "fp64")


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("bf16", "fp32"), ("fp32", "bf16"), ("fp32", "fp64")])
def test_another_precision_goes_on(pool: WorkerPool, small_run: Run, tmp_path: Path, before: str, after: str) -> None:
    pool.run(1, train_rank, small_run.but(steps=WHOLE), tmp_path / "unbroken")
    losses = broken_run(pool, small_run.but(dtype=before, tp=2), small_run.but(dtype=after), tmp_path / "broken")
    assert losses == pytest.approx(losses_of(tmp_path / "unbroken"), rel=2e-2)


@pytest.mark.slow
def test_narrow_runs_go_on_bit_equal(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """The wide masters are what is stored, not the bf16 weights."""
    run = small_run.but(dtype="bf16", pp=2)
    pool.run(2, train_rank, run.but(steps=WHOLE), tmp_path / "unbroken")
    assert broken_run(pool, run, run, tmp_path / "broken") == losses_of(tmp_path / "unbroken")


@pytest.mark.slow
def test_epochs_go_on(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """A run longer than its data, resumed inside the second pass with another number of replicas."""
    run = small_run.but(dtype="fp64", set=(("data.split", "10,90"), ("train.global_batch_size", 48)))
    pool.run(1, train_rank, run.but(steps=WHOLE), tmp_path / "unbroken")
    losses = broken_run(pool, run.but(dp=2), run.but(dp=3), tmp_path / "broken")
    assert same(losses, losses_of(tmp_path / "unbroken"), "fp64")
    log = (tmp_path / "broken" / "train.log").read_text()
    assert "global step 4, epoch: 1" in log


@pytest.fixture(scope="module")
def three_steps_of_eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files of exactly 24 samples of 16 tokens, and the label of the last."""
    tokenizer = words(50)
    documents = torch.randint(1, 50, (5, 76), generator=torch.Generator().manual_seed(0)).tolist()
    return write_ids(tmp_path_factory.mktemp("epoch") / "tokens", documents, tokenizer, eod=0)


@sweep(("before", "after"), [({"dp": 2}, {"dp": 4}), ({}, {}), ({"pp": 2}, {"dp": 2, "tp": 2})], ids=str, slow=(2,))
def test_a_run_goes_on_at_the_very_end_of_an_epoch(
    pool: WorkerPool, three_steps_of_eight: Path, tmp_path: Path, before: dict[str, int], after: dict[str, int]
) -> None:
    run = Run(three_steps_of_eight, dtype="fp64", steps=WHOLE, set=(("data.split", "1"), ("log.every", 1)))
    assert len(open_dataset(run.config).samples("train")) == HALF * run.config.train.global_batch_size
    pool.run(1, train_rank, run, tmp_path / "unbroken")
    losses = broken_run(pool, run.but(**before), run.but(**after), tmp_path / "broken")
    assert same(losses, losses_of(tmp_path / "unbroken"), "fp64")
    log = (tmp_path / "broken" / "train.log").read_text()
    places = re.findall(r"global step \d+, epoch: (\d+), batch: (\d+)", log)
    assert places == [("0", "0"), ("0", "1"), ("0", "2"), ("1", "0"), ("1", "1"), ("1", "2")]


def tied_copy_after_loading(run: Run, folder: Path, warm: bool) -> dict[str, bytes]:
    """The bits of the tied weight as this rank computes with it and updates it, and of its moments, straight after a
    checkpoint was loaded; empty on a rank that has no copy."""
    engine = engine_of(run.config)
    newest_one = newest(folder)
    assert newest_one is not None
    (load_weights if warm else restore_engine)(engine, newest_one)
    found = {}
    for entry in engine.optimizer.entries:
        if entry.name == "embed.tokens.weight":
            found |= {"leaf": entry.leaf, "master": entry.master, **engine.optimizer.rule.state(entry)}
    return {name: tensor.detach().contiguous().numpy().tobytes() for name, tensor in found.items()}


@pytest.mark.parametrize("warm", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["resumed", "warm-start"])
@sweep(
    ("before", "after", "copies"),
    [({}, {"dp": 2, "pp": 3}, 4), ({"pp": 2}, {"pp": 4}, 2), ({"tp": 2, "pp": 2}, {"dp": 3, "pp": 2}, 6)],
    ids=str,
    quick=(0,),
)
def test_tied_weights_are_equal_after_loading(
    pool: WorkerPool, small_run: Run, tmp_path: Path, before: dict, after: dict, copies: int, warm: bool
) -> None:
    """The first and the last stage get the same bits, those of the checkpoint, with the moments of both uses."""
    run = small_run.but(set=(("model.num_layers", 4), ("train.global_batch_size", 12)))
    saved = run.but(**before)
    pool.run(saved.world_size, train_rank, saved.but(steps=HALF), tmp_path)
    (stored,) = pool.run(1, tied_copy_after_loading, run, tmp_path, warm)
    split = run.but(**after)
    found = pool.run(split.world_size, tied_copy_after_loading, split, tmp_path, warm)
    held = [copy for copy in found if copy]
    assert len(held) == copies
    assert all(copy == stored for copy in held)
    assert len(set(stored["master"])) > 100  # neither zeros nor a constant


def test_the_manifest_says_where_the_run_stands(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    pool.run(2, train_rank, small_run.but(dp=2, steps=3), tmp_path)
    facts = manifest(tmp_path / "checkpoints" / "step_00000003")
    assert (facts["step"], facts["consumed_samples"], facts["seed"]) == (3, 24, 1234)

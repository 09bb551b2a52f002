"""What may change between a checkpoint and the run that resumes from it."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.sweep import sweep
from tests.train.support import Run, train_rank, write_tokens
from threefold.checkpoint.resume import find_resumption, find_warm_start
from threefold.errors import UserError
from threefold.verify.worker_pool import WorkerPool


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint after step 2."""
    folder = tmp_path_factory.mktemp("saved")
    pool.run(1, train_rank, small_run.but(steps=2), folder)
    return folder


def changed(run: Run, key: str, value: Any) -> Run:
    return run.but(steps=4, set=((key, value),))


@sweep(
    ("key", "value", "then"),
    [
        ("model.num_layers", 4, "3"),
        ("model.hidden_size", 36, "24"),
        ("model.num_attention_heads", 2, "4"),
        ("model.vocab_size", 302, "301"),
        ("model.tie_embeddings", False, "True"),
        ("model.max_position_embeddings", 17, "16"),
        ("train.seed", 5, "1234"),
        ("data.split", "70,30", "'80,20'"),
        ("optimizer.name", "sgd", "'adamw'"),
    ],
    quick=(0, 4, 6, 7),
)
def test_another_run_is_refused(saved: Path, small_run: Run, key: str, value: Any, then: str) -> None:
    with pytest.raises(UserError) as caught:
        find_resumption(saved, changed(small_run, key, value).config)
    assert str(caught.value).startswith(f"{key} is {value!r} but ")
    assert f"set it to {then}" in str(caught.value)


def mixture(run: Run, steps: int, **settings: Any) -> Run:
    model = {"architecture": "llama", "num_experts": 4, "position_embedding": "rope", **settings}
    return run.but(steps=steps, set=tuple((f"model.{name}", value) for name, value in model.items()))


def test_biases_of_experts_may_stop_and_are_not_lost(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """Also with settings that a stored config leaves out, whose values the sentences name."""
    pool.run(1, train_rank, mixture(small_run, 2, router="sigmoid", router_bias_rate=0.01), tmp_path)
    found = find_resumption(tmp_path, mixture(small_run, 4, router="sigmoid").config)
    assert any(line.startswith("model.router_bias_rate is 0.0 from here on; up to now") for line in found.warnings)
    with pytest.raises(UserError, match=r"model.router is 'softmax' but .* was made with 'sigmoid', whose weights"):
        find_resumption(tmp_path, mixture(small_run, 4, router_bias_rate=0.01).config)


def predicting(run: Run, steps: int, depths: int, **settings: Any) -> Run:
    model = {"architecture": "llama", "mtp_layers": depths, "position_embedding": "rope"}
    return run.but(steps=steps, set=(*((f"model.{name}", value) for name, value in model.items()), *settings.items()))


def test_a_run_keeps_its_further_blocks_and_another_may_begin_with_fewer(
    pool: WorkerPool, small_run: Run, tmp_path: Path
) -> None:
    pool.run(1, train_rank, predicting(small_run, 2, 1), tmp_path)
    with pytest.raises(UserError, match=r"model.mtp_layers is 0 but .* was made with 1, whose weights do not fit"):
        find_resumption(tmp_path, predicting(small_run, 4, 0).config)
    begun = {"train.init_from": str(tmp_path)}
    with pytest.raises(UserError, match=r"model.mtp_layers is 2 but .* has 1, whose weights do not fit"):
        find_warm_start(predicting(small_run, 4, 2, **begun).config)
    found = find_warm_start(predicting(small_run, 4, 0, **begun).config)
    assert found is not None
    assert [line for line in found.warnings if "mtp" in line] == [
        f"model.mtp_layers is 0; {found.checkpoint.path} had 1."
    ]


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.9, 0.0)])
def test_a_momentum_that_is_not_there_is_refused(
    pool: WorkerPool, small_run: Run, tmp_path: Path, before: float, after: float
) -> None:
    run, with_momentum = small_run.but(steps=2, set=sgd(before)), small_run.but(steps=4, set=sgd(after))
    pool.run(1, train_rank, run, tmp_path)
    with pytest.raises(UserError) as caught:
        find_resumption(tmp_path, with_momentum.config)
    assert str(caught.value).startswith(f"optimizer.momentum is {after} but {tmp_path}")
    assert f"set it to {before}, or start a new run" in str(caught.value)


def test_another_momentum_is_warned_of(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    pool.run(1, train_rank, small_run.but(steps=2, set=sgd(0.9)), tmp_path)
    warnings = find_resumption(tmp_path, small_run.but(steps=4, set=sgd(0.8)).config).warnings
    assert warnings == ("optimizer.momentum is 0.8 from here on; up to now it was 0.9.",)


def sgd(momentum: float) -> tuple[tuple[str, Any], ...]:
    return (("optimizer.name", "sgd"), ("optimizer.momentum", momentum))


@sweep(
    ("key", "value"),
    [
        ("optimizer.lr", 0.02),
        ("model.hidden_dropout", 0.2),
        ("precision.dtype", "bf16"),
        ("precision.fp8", True),
        ("optimizer.betas", (0.8, 0.9)),
        ("train.spike_factor", 3.0),
        ("train.spike_window", 7),
    ],
    quick=(1, 3, 5, 6),
)
def test_what_changes_the_losses_is_warned_of(saved: Path, small_run: Run, key: str, value: Any) -> None:
    warnings = find_resumption(saved, changed(small_run, key, value).config).warnings
    assert any(warning.startswith(f"{key} is ") for warning in warnings)


def test_gradients_in_16_bits_are_warned_of(saved: Path, small_run: Run) -> None:
    """As the one setting of `parallel` that changes the losses."""
    found = find_resumption(saved, changed(small_run.but(dp=2), "parallel.gradient_compression", "bf16").config)
    assert found.warnings == ("parallel.gradient_compression is 'bf16' from here on; up to now it was 'none'.",)


def test_another_grain_of_an_exact_run_is_warned_of(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """The sums of the steps to come have other bits."""
    pool.run(1, train_rank, small_run.but(steps=2, set=exact(grain_samples=2)), tmp_path)
    found = find_resumption(tmp_path, small_run.but(steps=4, set=exact(grain_samples=4)).config)
    assert found.warnings == ("train.grain_samples is 4 from here on; up to now it was 2.",)
    plain = find_resumption(tmp_path, small_run.but(steps=4).config)
    assert "train.exact is False from here on; up to now it was True." in plain.warnings


def exact(**grain: int) -> tuple[tuple[str, Any], ...]:
    sizes = {"grain_leaf": 1, "grain_tensor": 1, **grain}
    return (("train.exact", True), *((f"train.{name}", size) for name, size in sizes.items()))


@sweep(
    "run",
    [
        {"dp": 2, "tp": 2, "pp": 2},
        {"set": (("parallel.schedule", "gpipe"), ("train.micro_batch_size", 2), ("log.every", 7))},
        {"set": (("checkpoint.every", 9), ("train.eval_every", 3), ("model.initializer_range", 0.1))},
    ],
    quick=(0,),
)
def test_what_changes_nothing_is_free(saved: Path, small_run: Run, run: dict[str, Any]) -> None:
    found = find_resumption(saved, small_run.but(steps=4, **run).config)
    assert (found.checkpoint.step, found.warnings) == (2, ())


def test_the_data_may_move_but_not_change(saved: Path, small_run: Run, tmp_path: Path) -> None:
    run = small_run.but(steps=4)
    moved = tmp_path / "moved"
    moved.symlink_to(small_run.data)
    assert find_resumption(saved, run.but(data=moved).config).warnings == ()
    other = write_tokens(tmp_path / "other", ["another text altogether, of a few words only. " * 40] * 20)
    with pytest.raises(UserError, match="tokenizer"):
        find_resumption(saved, run.but(data=other).config)


def test_no_checkpoint(small_run: Run, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match="no complete checkpoint"):
            find_resumption(folder, small_run.config)


def test_nothing_left_to_do(saved: Path, small_run: Run) -> None:
    with pytest.raises(UserError, match=r"train.max_steps is 2 .* at step 2 already; set it to 3"):
        find_resumption(saved, small_run.but(steps=2).config)

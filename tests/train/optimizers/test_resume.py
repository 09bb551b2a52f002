"""The state of every optimizer goes through a checkpoint into another layout."""

from pathlib import Path
from typing import Any

from tests.support.sweep import sweep
from tests.train.support import Run, losses_of, same, train_rank
from threefold.launch.worker_pool import WorkerPool

HALF, WHOLE = 3, 6


@sweep(
    ("name", "settings"),
    [
        ("adam", {}),
        ("lion", {"lr": 1e-3, "eps": 1e-8}),
        ("muon", {}),
        ("sgd", {"momentum": 0.9, "lr": 0.1}),
        ("sgd", {"momentum": 0.8, "nesterov": True, "lr": 0.1}),
    ],
    ids=str,
)
def test_resumes_in_another_layout(
    pool: WorkerPool, small_run: Run, tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    """A llama in fp64, as it has no biases: Lion steps by the sign of a gradient, and a key bias has one of rounding
    alone."""
    given = {"optimizer.name": name, **{f"optimizer.{key}": value for key, value in settings.items()}}
    given |= {"model.architecture": "llama", "train.global_batch_size": 8}
    run = small_run.but(dtype="fp64", set=tuple(given.items()))
    pool.run(1, train_rank, run.but(steps=WHOLE), tmp_path / "uninterrupted")
    before = run.but(dp=2, tp=2, steps=HALF)
    after = run.but(dp=2, pp=2, steps=WHOLE, set=(*run.set, ("parallel.zero", 1)))
    pool.run(4, train_rank, before, tmp_path / "resumed")
    pool.run(4, train_rank, after, tmp_path / "resumed", True)
    assert same(losses_of(tmp_path / "resumed"), losses_of(tmp_path / "uninterrupted"), "fp64")

"""An exact run that changes its layout on the way leaves no trace: losses and weights are those of an unbroken run."""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.train.support import Run, manifest, steps_of, train_rank
from threefold.launch.worker_pool import WorkerPool

Settings = tuple[tuple[str, Any], ...]
LAYOUTS: list[tuple[int, int, int, Settings]] = [
    (1, 1, 1, ()),
    (2, 2, 1, (("parallel.sequence_parallel", True),)),
    (4, 1, 1, (("parallel.zero", 3),)),
    (1, 1, 3, (("train.micro_batch_size", 2),)),
    (2, 1, 2, (("parallel.schedule", "zero-bubble"),)),
    (1, 4, 1, (("train.recompute", "full"),)),
    (2, 1, 1, (("parallel.zero", 1), ("train.micro_batch_size", 4))),
    (1, 2, 2, (("parallel.schedule", "interleaved"),)),
    (8, 1, 1, ()),
    (2, 1, 1, (("parallel.zero", 2),)),
]
"""dp, tp, pp and further settings, which follow one another."""
CHANGE = 10
"""Steps after which the layout changes."""


@pytest.mark.parametrize(
    "steps", [pytest.param(30, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.sweep)]
)
def test_a_layout_that_changes_every_ten_steps(pool: WorkerPool, tokens: Path, tmp_path: Path, steps: int) -> None:
    settings = (
        ("train.exact", True),
        ("train.micro_batch_size", 1),
        ("model.num_layers", 4),
        ("model.vocab_size", 304),
        ("optimizer.decay_steps", steps),
    )
    run = Run(tokens, steps=steps, set=settings)
    pool.run(1, train_rank, run, tmp_path / "unbroken")
    for end, (dp, tp, pp, more) in zip(range(CHANGE, steps + 1, CHANGE), cycle(LAYOUTS), strict=False):
        part = run.but(dp=dp, tp=tp, pp=pp, steps=end, set=(*settings, *more))
        pool.run(part.world_size, train_rank, part, tmp_path / "changed", end > CHANGE)
    expected, found = steps_of(tmp_path / "unbroken"), steps_of(tmp_path / "changed")
    assert list(found) == list(range(1, steps + 1))
    for step, line in expected.items():
        for key in ("loss", "grad_norm", "fingerprint"):
            assert found[step][key] == line[key], (
                f"{key} of step {step} in {LAYOUTS[(step - 1) // CHANGE % len(LAYOUTS)]}"
            )
    last = f"checkpoints/step_{steps:08d}"
    assert manifest(tmp_path / "changed" / last)["fingerprint"] == expected[steps]["fingerprint"]

"""An exact run that changes its layout on the way leaves no trace: losses and weights are those of an unbroken run."""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.train.support import Run, manifest, steps_of, train_rank
from threefold.verify.worker_pool import WorkerPool

Settings = tuple[tuple[str, Any], ...]
Layout = tuple[int, int, int, Settings]
TEN: list[Layout] = [
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
TWO: list[Layout] = [(4, 1, 1, (("parallel.zero", 3),)), (2, 2, 1, ())]
OF_EXPERTS: list[Layout] = [(dp, tp, pp, (*more, ("parallel.ep", 2))) for dp, tp, pp, more in TWO]
MIXTURE: Settings = (
    ("model.architecture", "llama"),
    ("model.num_experts", 4),
    ("model.expert_capacity_factor", 1.0),
    ("model.router_aux_loss", 0.1),
)


@pytest.mark.parametrize(
    ("layouts", "change", "steps", "model"),
    [
        pytest.param(TWO, 3, 6, (), id="two"),
        pytest.param(OF_EXPERTS, 3, 6, MIXTURE, id="mixture", marks=pytest.mark.slow),
        pytest.param(TEN, 10, 30, (), id="three of ten", marks=pytest.mark.slow),
        pytest.param(TEN, 10, 200, (), id="ten, twice", marks=pytest.mark.sweep),
    ],
)
def test_a_change_of_layout_leaves_no_trace(
    pool: WorkerPool, tokens: Path, tmp_path: Path, layouts: list[Layout], change: int, steps: int, model: Settings
) -> None:
    settings = (
        ("train.exact", True),
        ("train.micro_batch_size", 1),
        ("model.num_layers", 4),
        ("model.vocab_size", 304),
        ("optimizer.decay_steps", steps),
        ("log.every", 1),
        *model,
    )
    run = Run(tokens, steps=steps, set=settings)
    pool.run(1, train_rank, run, tmp_path / "unbroken")
    for end, (dp, tp, pp, more) in zip(range(change, steps + 1, change), cycle(layouts), strict=False):
        part = run.but(dp=dp, tp=tp, pp=pp, steps=end, set=(*settings, *more))
        pool.run(part.world_size, train_rank, part, tmp_path / "changed", end > change)
    expected, found = steps_of(tmp_path / "unbroken"), steps_of(tmp_path / "changed")
    assert list(found) == list(range(1, steps + 1))
    for step, line in expected.items():
        for key in ("loss", "grad_norm", "fingerprint"):
            assert found[step][key] == line[key], f"{key} of step {step} in {layouts[(step - 1) // change % 10]}"
    last = f"checkpoints/step_{steps:08d}"
    assert manifest(tmp_path / "changed" / last)["fingerprint"] == expected[steps]["fingerprint"]

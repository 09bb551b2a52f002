"""`save` and `load` of what `prepare` returned: weights, buffers and optimizer state, in another layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import threefold as t3
from tests.compat.prepared.scripts import Script, Updates, continued, run, worst
from tests.support.sweep import sweep


def saved(script: Script, folder: Path) -> dict[str, Any]:
    """Half of the epochs; the states as one process has them."""
    torch.set_num_threads(1)
    model, optimizer, loader = t3.prepare(*script.make(), **dict(script.options))
    run(script, model, optimizer, loader)
    optimizer.param_groups[0]["lr"] *= 0.5
    t3.save(folder, 7, model=model, optimizer=optimizer)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def loaded(script: Script, folder: Path) -> tuple[int, Updates]:
    torch.set_num_threads(1)
    model, optimizer, loader = t3.prepare(*script.make(), **dict(script.options))
    step = t3.load(folder, model=model, optimizer=optimizer)
    return step, run(script, model, optimizer, loader)


@sweep(
    ("ranks", "script", "into"),
    [
        (2, Script("stack", "adamw", "float64", epochs=1, options=(("zero", 3),)), (3, (("zero", 1),))),
        (2, Script("stack", "adafactor", "float64", epochs=1, options=(("zero", 1),)), (3, ())),
        (1, Script("conv", "sgd", "float64", epochs=1), (3, (("zero", 2),))),
        (3, Script("stack", "adamw", "float64", epochs=1), (1, ())),
    ],
    quick=[0],
    ids=str,
)
def test_a_checkpoint_continues_in_another_layout(
    pool, tmp_path: Path, ranks: int, script: Script, into: tuple[int, Any]
) -> None:
    states = pool.run(ranks, saved, script, tmp_path)[0]
    alone = pool.run(1, continued, replace(script, options=()), states)[0]
    for step, found in pool.run(into[0], loaded, replace(script, options=into[1]), tmp_path):
        assert step == 7
        assert worst(found, alone) < 1e-10


def with_buffers(folder: Path) -> tuple[bool, float]:
    """Buffers of batch normalization, and the loss scale of fp16."""
    torch.manual_seed(0)
    model, optimizer = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = t3.prepare(model, optimizer, precision="fp16")
    t3.backward(model(torch.randn(4, 2)).square().mean())
    optimizer.step()
    model.sync.loss_scale.update(finite=False)
    t3.save(folder, 1, model=model, optimizer=optimizer)
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    other, again = t3.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1), precision="fp16")
    t3.load(folder, model=other, optimizer=again)
    same = all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    return same, other.sync.loss_scale.value / model.sync.loss_scale.value


def test_buffers_and_loss_scale_are_kept(pool, tmp_path: Path) -> None:
    assert pool.run(2, with_buffers, tmp_path) == [(True, 1.0)] * 2


def test_wrong_calls_are_one_sentence(tmp_path: Path) -> None:
    module = nn.Linear(2, 3)
    model, optimizer = t3.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for call, sentence in (
        (
            lambda: t3.save(tmp_path, 1, model=module),  # type: ignore[arg-type]
            "model is a Linear but must be one of threefold.parallelize(); give that.",
        ),
        (
            lambda: t3.save(tmp_path, 1, model=model, optimizer=optimizer.optimizer),
            "optimizer is a SGD but must be of threefold.prepare(); give that.",
        ),
        (
            lambda: t3.save(tmp_path, 1, model=t3.prepare(nn.Linear(2, 3)), optimizer=optimizer),
            "optimizer is of another model; give the model that it was made with.",
        ),
    ):
        with pytest.raises(t3.UserError) as raised:
            call()
        assert str(raised.value) == sentence


def test_one_process_needs_no_process_group(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        module = nn.Linear(2, 3)
        model, optimizer = t3.prepare(module, torch.optim.Adam(module.parameters(), lr=0.1))
        found.append((model, optimizer))
    (model, optimizer), (other, again) = found
    t3.backward(model(torch.ones(4, 2)).square().mean())
    optimizer.step()
    t3.save(tmp_path, 1, model=model, optimizer=optimizer)
    assert t3.load(tmp_path, model=other, optimizer=again) == 1
    assert torch.equal(other.module.weight, model.module.weight)
    for ours, theirs in zip(again.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
        assert ours["step"] == theirs["step"]

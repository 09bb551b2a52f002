"""Runs in fp16 of which one gradient overflows, and what is expected of them."""

from typing import Any

import torch
from torch import Tensor

from tests.support.parity import Case, make_engine, shard_of
from threefold.train.step import Engine, StepResult

FP16 = Case(dtype="fp16", dropout=0.1)


def overflowing(case: Case, place: tuple[int, ...], name: str, bad_step: int, value: float) -> list[Any]:
    """Return the result of each step and the bits of all state before and after it.

    One element of the gradient of `name`, computed by the rank at `place` in step `bad_step`, is `value`.
    """
    engine = make_engine(case)
    coordinates = engine.mesh.coordinates
    seen: list[tuple[StepResult, bytes, bytes]] = []
    for step in range(4):
        hooks = []
        if step == bad_step and (coordinates.dp, coordinates.tp, coordinates.pp) == place:
            (leaf,) = (entry.leaf for entry in engine.optimizer.entries if entry.name == name)
            hooks.append(leaf.register_hook(lambda gradient: _spoilt(gradient, value)))
        before = state_bits(engine)
        result = engine.train_step(shard_of(case, step, coordinates.dp), step)
        seen.append((result, before, state_bits(engine)))
        for hook in hooks:
            hook.remove()
    assert engine.loss_scale is not None
    return [seen, engine.loss_scale.value]


def _spoilt(gradient: Tensor, value: float) -> Tensor:
    spoilt = gradient.clone()
    spoilt.view(-1)[-1] = value
    return spoilt


def state_bits(engine: Engine) -> bytes:
    """Return the bits of master weights, computing weights and optimizer state, including the update count."""
    tensors = [tensor for entry in engine.optimizer.entries for tensor in (entry.master, entry.leaf)]
    tensors += [value for _, _, value in engine.optimizer.states()]
    return b"".join(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)


def check_skipped_by_all(ranks: list[list[Any]], bad_step: int) -> None:
    for rank, (seen, scale) in enumerate(ranks):
        for step, (result, before, after) in enumerate(seen):
            bad = step == bad_step
            assert result.skipped == bad, f"rank {rank} step {step}"
            assert (after == before) == bad, f"rank {rank} step {step}"
            assert result.loss_scale == (65536.0 if step <= bad_step else 32768.0)
            assert result.loss == ranks[0][0][step][0].loss
        assert scale == 32768.0

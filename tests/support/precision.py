"""Runs in low precision, and their expected results."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.parity import Case, Trace, make_engine, shard_of
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.comm.reductions import Event
from threefold.dtypes import DTYPES
from threefold.parallel.compression import NarrowSum
from threefold.parallel.gradients import GradientBuckets
from threefold.train.step import Engine, StepResult
from threefold.verify.compare import relative_error

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


def narrow_departures(expected: Trace, traces: list[Trace], limit: float) -> list[str]:
    """Return losses, norms or gradients of the first step that differ from fp32 by more than rounding explains."""
    found = []
    for trace in traces:
        if not abs(trace.losses[0] / expected.losses[0] - 1) <= limit:
            found.append(f"loss {trace.losses[0]} is not {expected.losses[0]}")
        if not abs(trace.norms[0] / expected.norms[0] - 1) <= limit:
            found.append(f"norm {trace.norms[0]} is not {expected.norms[0]}")
        for name, gradient in trace.gradients[0].items():
            if not relative_error(gradient, expected.gradients[0][name]) <= 4 * limit:
                found.append(f"grad {name}")
    return found


def part(rank: int, size: float) -> Tensor:
    """Return one replica's bucket: numbers of either sign over nine powers of ten below `size`."""
    generator = torch.Generator().manual_seed(rank)
    magnitude = 10 ** (torch.rand(1001, generator=generator) * 9 - 9)
    return magnitude * torch.randn(1001, generator=generator) * size


def narrow_sums(name: str, sizes: list[float]) -> tuple[list[Tensor], list[Event]]:
    mesh = Mesh(Layout(dp=torch.distributed.get_world_size()))
    found = []
    with mesh.recorder.recording() as events:
        for size in sizes:
            flat = part(mesh.rank, size)
            NarrowSum(flat, mesh.dp, DTYPES[name]).finish()
            found.append(flat)
    return found, list(events)


def narrow_sum() -> Tensor:
    """Sum many small bf16 gradients; a sum in bf16 would stop growing."""
    mesh = Mesh(Layout())
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    buckets = GradientBuckets([weight], mesh.dp, torch.float32)
    buckets.begin(1000)
    for _ in range(1000):
        (weight * 1.0).sum().backward()
    buckets.finish()
    return buckets[weight].clone()

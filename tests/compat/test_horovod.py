"""Horovod's manner: an optimizer that sums gradients, and broadcasts of parameters and optimizer state."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import threefold as t3
import threefold.compat.horovod as hvd
from tests.support.sweep import sweep

ROWS = 12  # divisible by 2, 3 and 4


def make(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 4), nn.Linear(4, 4)).to(dtype)
    unused = nn.Linear(4, 4).to(dtype)
    parameters = [*model.parameters(), *unused.parameters()]
    return nn.ModuleList([model, unused]), torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-5)


def rows(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(0, 4, (ROWS,), generator=generator)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if each.grad is None else each.grad.clone() for name, each in model.named_parameters()}


def alone(dtype: torch.dtype, clip: float) -> list[dict[str, Tensor | None]]:
    model, optimizer = make(dtype)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        x, y = rows(step, dtype)
        F.cross_entropy(model[0](x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        found.append(
            {name: None if each.grad is None else each.grad.clone() for name, each in model.named_parameters()}
        )
        optimizer.step()
        found.append({name: each.detach().clone() for name, each in model.named_parameters()})
    return found


def distributed(dtype: torch.dtype, clip: float, passes: int, compression: str) -> list[dict[str, Tensor | None]]:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, inner = make(dtype)
    if rank:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        inner.param_groups[0]["lr"] = 7.0
    optimizer = hvd.DistributedOptimizer(
        inner, named_parameters=model.named_parameters(), compression=compression, backward_passes_per_step=passes
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        x, y = (each.tensor_split(ranks)[rank] for each in rows(step, dtype))
        for part_x, part_y in zip(x.split(len(x) // passes), y.split(len(y) // passes), strict=True):
            (F.cross_entropy(model[0](part_x), part_y) / passes).backward()
        optimizer.synchronize()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        found.append(
            {name: None if each.grad is None else each.grad.clone() for name, each in model.named_parameters()}
        )
        with optimizer.skip_synchronize():
            optimizer.step()
        found.append({name: each.detach().clone() for name, each in model.named_parameters()})
    return found


@sweep(
    ("ranks", "dtype", "clip", "passes", "compression"),
    [
        (3, torch.float64, 0.1, 2, "none"),
        (2, torch.float32, 0.0, 1, "none"),
        (4, torch.float64, 0.0, 3, "none"),
        (2, torch.float32, 0.0, 2, "fp16"),
        (3, torch.float32, 0.1, 1, "bf16"),
    ],
    quick=[0],
)
def test_updates_are_those_of_one_process(
    pool, ranks: int, dtype: torch.dtype, clip: float, passes: int, compression: str
) -> None:
    expected = pool.run(1, alone, dtype, clip)[0]
    bound = {"none": 1e-4 if dtype == torch.float32 else 1e-10, "fp16": 0.05, "bf16": 0.2}[compression]
    for found in pool.run(ranks, distributed, dtype, clip, passes, compression):
        for ours, theirs in zip(found, expected, strict=True):
            for name, value in theirs.items():
                mine = ours[name]
                assert (mine is None) == (value is None)
                if mine is not None and value is not None:
                    assert float((mine - value).abs().max()) <= bound * float(value.abs().max())


def helpers() -> tuple[float, float, Any]:
    rank = torch.distributed.get_rank()
    total = hvd.allreduce(torch.tensor([rank + 1.0]), average=False)
    return (
        float(hvd.allreduce(torch.tensor([rank + 1.0]))),
        float(total),
        hvd.broadcast_object({"of": rank}, root_rank=1),
    )


def test_small_helpers(pool) -> None:
    assert pool.run(3, helpers) == [(2.0, 6.0, {"of": 1})] * 3


def _wrong_calls() -> list[str]:
    model, inner = make(torch.float32)
    other = nn.Linear(2, 2)

    def step_without() -> None:
        hvd.DistributedOptimizer(inner).step()

    def too_many() -> None:
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        for _ in range(2):
            model[0](torch.ones(1, 3)).sum().backward()
        optimizer.step()

    calls: list[Callable[[], Any]] = [
        lambda: hvd.DistributedOptimizer(model),
        lambda: hvd.DistributedOptimizer(inner, compression="fp12"),
        lambda: hvd.DistributedOptimizer(inner, backward_passes_per_step=0),
        lambda: hvd.DistributedOptimizer(inner, named_parameters=other.named_parameters()),
        lambda: hvd.DistributedOptimizer(inner).step(lambda: 0.0),
        lambda: hvd.DistributedOptimizer(inner).skip_synchronize().__enter__(),
        step_without,
        too_many,
        lambda: hvd.broadcast_parameters(model),
        lambda: hvd.broadcast_parameters(model.parameters()),
        lambda: hvd.broadcast_parameters(model.state_dict(), root_rank=9),
    ]
    said = []
    for call in calls:
        model, inner = make(torch.float32)
        with pytest.raises(t3.UserError) as raised:
            call()
        said.append(str(raised.value))
    return said


def test_wrong_calls_are_one_sentence(pool) -> None:
    for said in pool.run(2, _wrong_calls):
        said[7] = said[7].replace("0.3.weight", "0.3.bias")  # whichever autograd reaches first
        assert said == [
            "optimizer is of the type ModuleList but must be a torch.optim.Optimizer; pass "
            "torch.optim.AdamW(model.parameters()), say.",
            "compression is 'fp12' but must be one of none, fp16, bf16; the nearest is fp16.",
            "backward_passes_per_step is 0 but must be a whole number of at least 1; use 1.",
            "named_parameters lacks 8 of the optimizer's 8 parameters; use model.named_parameters() of the "
            "optimizer's model.",
            "optimizer.step was given a closure, which would sum gradients twice; call it without.",
            "skip_synchronize was entered before synchronize; call optimizer.synchronize() first.",
            "optimizer.step was called without gradients; call loss.backward() before it.",
            "The parameter '0.3.bias' got a gradient 2 times since zero_grad but backward_passes_per_step is 1; set it "
            "to the number of backward passes before each step, and call zero_grad after it.",
            "parameters is of the type ModuleList but must be a state_dict or named parameters; use "
            "model.state_dict().",
            "parameters has tensors without names but must have pairs of both; use model.named_parameters().",
            "root_rank is 9 but the world has the ranks 0 to 1; use 0.",
        ]


def test_without_a_process_group_there_are_no_ranks() -> None:
    with pytest.raises(t3.UserError, match=r"torch.distributed is not initialised.*; call threefold.init_mesh"):
        hvd.broadcast_object(1)

"""Horovod's optimizer against one process of plain PyTorch: gradients before each update, and weights after it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import threefold.compat.horovod as hvd
from tests.support.sentences import sentence
from tests.support.sweep import sweep

ROWS, STEPS = 12, 3  # rows divisible by 2, 3 and 4
Values = dict[str, Tensor | None]


def make(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose second half of the rows does not use one layer, and one layer that nothing uses."""
    torch.manual_seed(0)
    layers = {"up": nn.Linear(3, 7), "down": nn.Linear(7, 5), "some": nn.Linear(7, 5), "unused": nn.Linear(4, 4)}
    model = nn.ModuleDict(layers).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-5)


def losses(model: nn.Module, x: Tensor, y: Tensor, first: bool) -> Tensor:
    hidden = torch.tanh(model["up"](x))
    return F.cross_entropy(model["down"](hidden) + (model["some"](hidden) if first else 0), y)


def rows(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = 5 * torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(0, 5, (ROWS,), generator=generator)


def values(model: nn.Module, gradients: bool) -> Values:
    pairs = [(name, each.grad if gradients else each) for name, each in model.named_parameters()]
    return {name: None if each is None else each.detach().clone() for name, each in pairs}


def alone(dtype: torch.dtype, clip: float, ranks: int) -> list[Values]:
    """Plain PyTorch; the rows of rank 0 use a layer that the others do not."""
    model, optimizer = make(dtype)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = (each.tensor_split(ranks) for each in rows(step, dtype))
        (sum(losses(model, x[rank], y[rank], rank == 0) for rank in range(ranks)) / ranks).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        found.append(values(model, True))
        optimizer.step()
        found.append(values(model, False))
    return found


def distributed(dtype: torch.dtype, clip: float, passes: int, compression: str, synchronizes: bool) -> list[Values]:
    rank, ranks = hvd.rank(), hvd.size()
    model, inner = make(dtype)
    if rank:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        inner.param_groups[0]["lr"] = 7.0
    optimizer = hvd.DistributedOptimizer(
        inner,
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, compression),
        backward_passes_per_step=passes,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = (each.tensor_split(ranks)[rank] for each in rows(step, dtype))
        for part_x, part_y in zip(x.split(len(x) // passes), y.split(len(y) // passes), strict=True):
            (losses(model, part_x, part_y, rank == 0) / passes).backward()
        if synchronizes:
            optimizer.synchronize()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        found.append(values(model, True))
        if synchronizes:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        found.append(values(model, False))
    return found


def assert_close(found: list[Values], expected: list[Values], bound: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            mine = ours[name]
            assert (mine is None) == (value is None), name
            if mine is not None and value is not None:
                assert float((mine - value).abs().max()) <= bound * max(float(value.abs().max()), 1e-3), name


@sweep(
    ("ranks", "dtype", "clip", "passes", "compression", "synchronizes"),
    [
        (3, torch.float64, 0.1, 2, "none", False),
        (2, torch.float64, 0.1, 1, "none", False),
        (3, torch.float64, 0.1, 2, "none", True),
        (2, torch.float32, 0.0, 1, "none", False),
        (4, torch.float64, 0.0, 3, "none", True),
        (2, torch.float32, 0.0, 2, "fp16", False),
        (3, torch.float32, 0.1, 1, "bf16", True),
    ],
    quick=[0, 1],
)
def test_updates_are_those_of_one_process(
    pool, ranks: int, dtype: torch.dtype, clip: float, passes: int, compression: str, synchronizes: bool
) -> None:
    expected = pool.run(1, alone, dtype, clip, ranks)[0]
    bound = {"none": 1e-4 if dtype == torch.float32 else 1e-12, "fp16": 0.05, "bf16": 0.2}[compression]
    for found in pool.run(ranks, distributed, dtype, clip, passes, compression, synchronizes):
        assert_close(found, expected, bound)


class Both(nn.Module):
    """Two parts that separate losses train, and a sparse table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)
        self.table = nn.Embedding(11, 4, sparse=True)


def part(rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(24).reshape(12, 2).mul(7).remainder(11)
    return tuple(each.tensor_split(ranks)[rank] for each in (ids, torch.arange(12) % 3))


def of_several_losses(ranks: int, op: hvd.ReduceOperation | None, factor: float = 1.0) -> list[Values]:
    """Two losses with their own backward passes, gradients that model.zero_grad clears, a group that is added."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(1)
        model, later = Both(), nn.Linear(3, 3)
        optimizer = torch.optim.SGD([*model.parameters()], lr=0.5)
        if op is not None:
            optimizer = hvd.DistributedOptimizer(optimizer, op=op, gradient_predivide_factor=factor)
        found = []
        for step in range(STEPS):
            if step == 1:
                optimizer.add_param_group({"params": [*later.parameters()]})
            both = nn.ModuleList([model, later])
            both.zero_grad()
            for name in ("first", "second"):
                for rank in range(ranks) if op is None else [hvd.rank()]:
                    ids, labels = part(rank, ranks)
                    x = getattr(model, name)(
                        model.table(ids).mean(1) if name == "first" else ids.sin()[:, [0, 1, 0, 1]]
                    )
                    loss = F.cross_entropy(later(x) if name == "first" else x, labels)
                    (loss / ranks if op is None else loss).backward()
            found.append({name: value.to_dense() for name, value in values(model, True).items() if value is not None})
            optimizer.step()
            found.append(values(both, False))
        return found
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("factor", [1.0, 3.7])
def test_losses_with_their_own_backward_passes_and_sparse_gradients(pool, factor: float) -> None:
    expected = pool.run(1, of_several_losses, 3, None)[0]
    found = pool.run(3, of_several_losses, 3, hvd.Average, factor)
    for each in found:
        assert_close(each, expected, 1e-12)
    assert expected[0]["table.weight"] is not None


def with_a_layer_of_one_rank() -> list[float]:
    """The all-reduce starts in the backward pass of rank 0, which uses all layers, and after it on the others."""
    first, second = (nn.Linear(2, 2, bias=False) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first.weight, second.weight], lr=1.0))
    x = torch.full((1, 2), hvd.rank() + 1.0)
    (first(x).sum() + (second(x).sum() if hvd.rank() == 0 else 0)).backward()
    optimizer.step()
    return [float(each.weight.grad[0, 0]) for each in (first, second)]


def test_a_layer_that_one_rank_uses_has_the_mean_with_zeros(pool) -> None:
    assert pool.run(4, with_a_layer_of_one_rank) == [[2.5, 0.25]] * 4


def passes_after_an_early_sum(ranks: int) -> list[Tensor]:
    """Two of three passes, a sum, and two more, of which the first uses one layer alone; plain PyTorch on one rank."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]).double()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.5)
    if ranks == 1:
        of, share = range(2), 0.5
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=3)
        of, share = [hvd.rank()], 1.0
    for number in range(4):
        for rank in of:
            x = torch.linspace(-1, 1 + rank, 3 * (number + 2)).double().view(-1, 3)
            used = [layer for place, layer in enumerate(layers) if place == 1 or number != 2]
            (sum(layer(x).square().sum() for layer in used) * share).backward()
        if number == 1 and ranks > 1:
            optimizer.synchronize()
    optimizer.step()
    return [each.detach() for parameter in layers.parameters() for each in (parameter.grad, parameter)]


def test_passes_after_an_early_sum_are_all_in_the_mean(pool) -> None:
    expected = pool.run(1, passes_after_an_early_sum, 1)[0]
    for found in pool.run(2, passes_after_an_early_sum, 2):
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def clearing_between_passes(ranks: int, dtype: torch.dtype, set_to_none: bool) -> list[Tensor]:
    """Two of three passes, `model.zero_grad`, and one that uses one layer alone; plain PyTorch on one rank."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]).to(dtype)
    optimizer, of, share = torch.optim.SGD(layers.parameters(), lr=0.5, momentum=0.9), range(ranks), 1 / ranks
    if hvd.size() > 1:
        optimizer, of, share = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=3), [hvd.rank()], 1.0
    for _ in range(2):
        for number in range(3):
            if number == 2:
                layers.zero_grad(set_to_none)
            for rank in of:
                x = torch.linspace(-1, 1 + rank, 3 * (number + 2)).to(dtype).view(-1, 3)
                loss = sum(layer(x).square().sum() for layer in layers[: 1 if number == 2 else 2])
                (loss * share).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().double() for parameter in layers.parameters()]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cleared_gradients_drop_the_passes_before(pool, dtype: torch.dtype, set_to_none: bool) -> None:
    expected = pool.run(1, clearing_between_passes, 2, dtype, set_to_none)[0]
    bound = 1e-12 if dtype == torch.float64 else 0.02
    for found in pool.run(2, clearing_between_passes, 2, dtype, set_to_none):
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=bound, atol=bound)


def small_gradients_of_several_passes() -> float:
    """A gradient of 1, and 16 that are too small for a bf16 sum of 1 to change."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), backward_passes_per_step=17)
    for number in range(17):
        (model(torch.ones(1, 1, dtype=torch.bfloat16)) * (2.0**-9 if number else 1.0)).sum().backward()
    optimizer.step()
    return float(model.weight.grad)


def test_narrow_gradients_of_several_passes_are_added_in_fp32(pool) -> None:
    assert pool.run(2, small_gradients_of_several_passes) == [1 + 2.0**-5] * 2


def with_sum() -> Tensor:
    model = nn.Linear(4, 3, bias=False).double()
    nn.init.constant_(model.weight, 0.1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.full((1, 4), hvd.rank() + 1.0, dtype=torch.float64))).sum().backward()
        optimizer.step()
    return model.weight.detach()


def test_a_sum_is_no_mean(pool) -> None:
    for found in pool.run(3, with_sum):
        torch.testing.assert_close(found, torch.full_like(found, 0.1 - 2 * (1 + 2 + 3)), rtol=1e-12, atol=0)


def skipping_a_step() -> tuple[float, bool, float]:
    """Loss scaling whose first step overflows, with the gradients of one rank."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0, fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    first = 0.0
    for step in range(2):
        model.zero_grad()
        value = float("inf") if step == 0 and hvd.rank() == 1 else hvd.rank() + 1.0
        scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        first = first or float(model.weight.detach()[0, 0])
    return first, isinstance(optimizer, torch.optim.Optimizer), float(model.weight.detach()[0, 0])


def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(pool) -> None:
    assert pool.run(2, skipping_a_step) == [(1.0, True, 1 - 1.5)] * 2


def with_a_schedule() -> tuple[list[float], bool]:
    model = nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    rates = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    model.bias.requires_grad_(False)
    optimizer.zero_grad()
    model.bias.requires_grad_(True)  # unfrozen in the middle of a step: summed from the next one on
    optimizer.zero_grad()
    model(torch.full((1, 2), hvd.rank() + 1.0)).sum().backward()
    gathered = hvd.allgather(torch.stack([model.bias.grad, model.weight.grad[0]]))
    return rates, bool((gathered[:2] == gathered[2:]).all())


def test_torchs_schedules_take_it_and_parameters_may_be_unfrozen(pool) -> None:
    assert pool.run(2, with_a_schedule) == [([0.5, 0.25, 0.125], True)] * 2


def _wrong_calls() -> list[str]:
    model, inner = make(torch.float32)
    other = nn.Linear(2, 2)

    def step_without() -> None:
        hvd.DistributedOptimizer(inner).step()

    def too_many() -> None:
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        for _ in range(2):
            losses(model, torch.ones(1, 3), torch.tensor([1]), True).backward()
        optimizer.step()

    def summed_twice() -> None:
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), backward_passes_per_step=2, op=hvd.Sum)
        for _ in range(2):
            model["up"](torch.ones(1, 3)).sum().backward()
        optimizer.synchronize()
        model["up"](torch.ones(1, 3)).sum().backward()

    calls: list[Callable[[], Any]] = [
        lambda: hvd.DistributedOptimizer(model),
        lambda: hvd.DistributedOptimizer(inner, compression="fp12"),
        lambda: hvd.DistributedOptimizer(inner, backward_passes_per_step=0),
        lambda: hvd.DistributedOptimizer(inner, named_parameters=other.named_parameters()),
        lambda: hvd.DistributedOptimizer(inner, named_parameters=model.parameters()),
        lambda: hvd.DistributedOptimizer(inner, named_parameters=[("a", other.weight), ("a", other.bias)]),
        lambda: hvd.DistributedOptimizer(inner, op=hvd.Adasum),
        lambda: hvd.DistributedOptimizer(inner, op=hvd.Min),
        lambda: hvd.DistributedOptimizer(inner, op=hvd.Sum, gradient_predivide_factor=2.0),
        lambda: hvd.DistributedOptimizer(inner, process_set=[0]),
        lambda: hvd.DistributedOptimizer(inner).step(lambda: 0.0),
        lambda: hvd.DistributedOptimizer(inner).skip_synchronize().__enter__(),
        step_without,
        too_many,
        summed_twice,
        lambda: hvd.broadcast_parameters(model),
        lambda: hvd.broadcast_parameters(model.state_dict(), root_rank=9),
    ]
    said = []
    for call in calls:
        model, inner = make(torch.float32)
        said.append(sentence(call))
    return said


def test_wrong_calls_are_one_sentence(pool) -> None:
    for said in pool.run(2, _wrong_calls):
        for place in (13, 14):  # whichever autograd reaches first
            said[place] = said[place].split("'", 2)[2]
        assert said == [
            "optimizer is of the type ModuleDict but must be a torch.optim.Optimizer; pass "
            "torch.optim.AdamW(model.parameters()), say.",
            "compression is 'fp12' but must be one of Compression.none, Compression.fp16 and Compression.bf16; use "
            "Compression.fp16.",
            "backward_passes_per_step is 0 but must be a whole number of at least 1; use 1.",
            "named_parameters lacks 8 of the optimizer's 8 parameters; use model.named_parameters() of the "
            "optimizer's model.",
            "named_parameters has parameters without names; use model.named_parameters().",
            "named_parameters has the name 'a' twice; use model.named_parameters() of one model.",
            "op is Adasum, which has no counterpart; use hvd.Average.",
            "op is Min but gradients have a mean or a sum; use hvd.Average.",
            "gradient_predivide_factor is 2.0 but splits a mean, and op is Sum; use op=hvd.Average.",
            "process_set is given but collectives are over all ranks; leave it out.",
            "optimizer.step was given a closure, which would sum gradients twice; call it without.",
            "skip_synchronize was entered before synchronize; call optimizer.synchronize() first.",
            "optimizer.step was called without gradients; call loss.backward() before it.",
            " got a gradient 2 times since zero_grad but backward_passes_per_step is 1; set it to the number of "
            "backward passes before each step, and call zero_grad after it.",
            " got a gradient after its gradients had been summed over the ranks; use op=hvd.Average, or one backward "
            "pass of the sum of the losses.",
            "params is of the type ModuleDict but must be a state_dict or parameters; use model.state_dict().",
            "root_rank is 9 but the world has the ranks 0 to 1; use 0.",
        ]

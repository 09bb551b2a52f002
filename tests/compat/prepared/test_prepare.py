"""What prepared objects do beside updates: data, metrics, precision, compression, state, schedules, subsets."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import threefold as t3
from tests.compat.prepared.scripts import Script, Updates, continued, first_half, plain, prepared, worst
from tests.support.sweep import sweep
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh


class Numbers(IterableDataset[Tensor]):
    """The numbers 0 to 10."""

    def __iter__(self) -> Any:
        return iter(torch.arange(11))


def read_numbers(drop_last: bool) -> dict[str, list[list[int]]]:
    """The global batches as `gather_for_metrics` gives them, of two epochs, and this replica's rows."""
    torch.manual_seed(torch.distributed.get_rank())  # rank 0 decides about the order
    found: dict[str, list[list[int]]] = {}
    data = TensorDataset(torch.arange(11))
    loaders = {
        "shuffled": DataLoader(data, 4, shuffle=True, drop_last=drop_last),
        "in order": DataLoader(data, batch_sampler=[[0, 1, 2], [3], [4, 5, 6, 7, 8, 9]]),
        "stream": DataLoader(Numbers(), 4, drop_last=drop_last),
    }
    for name, loader in loaders.items():
        loader = t3.prepare(loader)
        found[name], found[f"{name}, own"] = [], []
        for _ in range(2):
            for batch in loader:
                rows = batch if name == "stream" else batch[0]
                whole, twice = t3.gather_for_metrics((rows, {"twice": 2 * rows}), loader)
                assert (twice["twice"] == 2 * whole).all()
                found[name].append(whole.tolist())
                found[f"{name}, own"].append(rows.tolist())
    return found


def plain_numbers(drop_last: bool) -> list[list[int]]:
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.arange(11)), 4, shuffle=True, drop_last=drop_last)
    return [rows.tolist() for _ in range(2) for (rows,) in loader]


@sweep(("ranks", "drop_last"), [(3, False), (2, True), (4, False), (1, False)], quick=[0])
def test_replicas_divide_the_batches_of_one_process(pool, ranks: int, drop_last: bool) -> None:
    results = pool.run(ranks, read_numbers, drop_last)
    shuffled = pool.run(1, plain_numbers, drop_last)[0]
    stream = [[0, 1, 2, 3], [4, 5, 6, 7], *([] if drop_last else [[8, 9, 10]])] * 2
    for found in results:
        assert found["shuffled"] == shuffled
        assert found["in order"] == [[0, 1, 2], [3], [4, 5, 6, 7, 8, 9]] * 2
        assert found["stream"] == stream
    parts = [found["in order, own"][2] for found in results]
    assert sorted(row for part in parts for row in part) == [4, 5, 6, 7, 8, 9]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.slow
def test_narrow_precision_computes_near_fp32_and_in_its_own_dtype(pool) -> None:
    expected = pool.run(1, plain, Script("stack", "sgd"))[0]
    for precision, bound in (("bf16", 0.05), ("fp16", 0.01)):
        options = (("precision", precision), ("zero", 2))
        found = pool.run(2, prepared, Script("stack", "sgd", options=options))[0]
        assert 1e-5 < _distance(found, expected) < bound


@sweep(("dtype", "zero"), [("fp16", 3), ("fp16", 0), ("bf16", 0), ("fp16", 1), ("bf16", 2)], quick=[0])
def test_compressed_gradients_are_near_the_exact_ones(pool, dtype: str, zero: int) -> None:
    expected = pool.run(1, plain, Script("stack", "sgd"))[0]
    found = pool.run(3, prepared, Script("stack", "sgd", options=(("compress", dtype), ("zero", zero))))
    assert 1e-6 < _distance(found[0], expected) < 0.05
    assert all(worst(each, found[0]) == 0 for each in found)


def _distance(found: Updates, expected: Updates) -> float:
    """The relative error of the first gradients together."""
    one = torch.cat([each.flatten() for each in found.gradients[0].values() if each is not None])
    other = torch.cat([each.flatten() for each in expected.gradients[0].values() if each is not None])
    return float((one - other).norm() / other.norm())


def overflowing_step() -> tuple[bool, float, float, bool, list[int]]:
    """A step whose gradients overflow in fp16, and two more; last, the steps for which the loss scale has held."""
    model, optimizer = nn.Linear(1, 1, bias=False), None
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = t3.prepare(model, optimizer, schedule, precision="fp16")
    before = model.weight.item()
    rates, held = [], []
    for scale in (1e38, 1.0, 1.0):
        t3.backward(model(torch.full((2, 1), 0.5)).sum() * scale, reduction="sum")
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
        held.append(model.sync.loss_scale.good_steps)
        if scale > 1:
            skipped = optimizer.step_was_skipped and model.weight.item() == before
    return skipped, rates[0], rates[1], optimizer.step_was_skipped, held


def test_an_overflow_in_fp16_skips_the_update_and_the_schedule(pool) -> None:
    for found in pool.run(2, overflowing_step):
        assert found == (True, 1.0, 0.5, False, [0, 1, 2])


def test_a_norm_below_the_limit_clips_nothing(pool) -> None:
    script = Script("stack", "sgd", "float64", epochs=1, clip=1e3)
    expected, found = pool.run(1, plain, script)[0], pool.run(1, prepared, script)[0]
    assert max(found.norms) < 1e3
    assert worst(found, expected) < 1e-10


@sweep(
    ("ranks", "script", "into"),
    [
        (2, Script("stack", "adamw", "float64", epochs=1, options=(("zero", 3),)), (3, (("zero", 1),))),
        (3, Script("stack", "adafactor", "float64", epochs=1, options=(("zero", 1),)), (2, ())),
        (1, Script("stack", "sgd", "float64", epochs=1), (4, (("zero", 2),))),
        (2, Script("stack", "adafactor", "float64", epochs=1), (3, (("zero", 3),))),
    ],
    quick=[1],
    ids=str,
)
def test_the_state_of_one_layout_goes_on_in_another(pool, ranks: int, script: Script, into: tuple[int, Any]) -> None:
    first = pool.run(ranks, first_half, script)[0]
    alone = pool.run(1, continued, replace(script, options=()), first)[0]
    for found in pool.run(into[0], continued, replace(script, options=into[1]), first):
        assert worst(found, alone) < 1e-10


def in_parts() -> tuple[list[float], list[float], list[list[list[float]]]]:
    """A model prepared first, its optimizer and loader later; and a model alone with an optimizer of torch. Third, the
    rows that this rank gets from a loader that is prepared with a model, and from one that is prepared alone."""
    x = torch.linspace(-1, 2, 10).view(5, 2)
    losses: tuple[list[float], list[float]] = ([], [])
    torch.manual_seed(0)
    model = t3.prepare(nn.Linear(2, 1))
    again, optimizer = t3.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader, _ = t3.prepare(DataLoader(TensorDataset(x), 5), model)
    assert again is model
    alone = t3.prepare(DataLoader(TensorDataset(x), 5))
    own_rows = [[row for (rows,) in each for row in rows.tolist()] for each in (loader, alone)]
    for _ in range(3):
        for (rows,) in loader:
            t3.backward(model(rows).square().mean())
            optimizer.step()
            losses[0].append(optimizer.loss)
    torch.manual_seed(0)
    model = t3.prepare(nn.Linear(2, 1))
    plain_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = x.tensor_split(torch.distributed.get_world_size())[torch.distributed.get_rank()]
    for _ in range(3):
        plain_optimizer.zero_grad()
        t3.backward(model(own).square().mean(), count=len(own))
        plain_optimizer.step()
        losses[1].append(model.sync.loss)
    return *losses, own_rows


def test_objects_can_be_prepared_one_after_another(pool) -> None:
    expected = pool.run(1, in_parts)[0]
    assert expected[0] == pytest.approx(expected[1])
    ranks = pool.run(2, in_parts)
    for place, whole in enumerate(expected[2]):
        shares = [rank[2][place] for rank in ranks]
        assert sorted(map(len, shares)) == [2, 3]  # a loader that every rank reads whole has the same losses
        assert sorted(row for share in shares for row in share) == whole
    for found in ranks:
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1] == pytest.approx(expected[0], rel=1e-5)


class Dropping(nn.Module):
    """With dropout of torch, or with the package's own, whose keys follow from the numbers of the samples."""

    def __init__(self, keyed: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 40), nn.Linear(40, 1)
        self.dropout = t3.Dropout(0.5, "dropout") if keyed else nn.Dropout(0.5)
        self.keyed = keyed

    def forward(self, x: Tensor, rows: Tensor, step: int) -> Tensor:
        x = self.first(x)
        x = self.dropout(x, t3.sample_keys(0, step, rows)) if self.keyed else self.dropout(x)
        return self.last(x).squeeze(-1)


def with_dropout(keyed: bool) -> list[float]:
    torch.manual_seed(0)
    model = Dropping(keyed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = TensorDataset(torch.linspace(-1, 2, 96).view(16, 6), torch.arange(16))
    model, optimizer, loader = t3.prepare(model, optimizer, DataLoader(data, 8))
    losses = []
    for step, (x, rows) in enumerate(loader):
        t3.backward((model(x, rows, step) - 1).square().mean())
        optimizer.step()
        losses.append(optimizer.loss)
    return losses


def test_dropout_follows_from_the_layout_unless_it_is_keyed_by_the_sample(pool) -> None:
    """As docs/guides/one_call.md says: that of torch draws from each rank's generator."""
    for keyed in (True, False):
        alone = pool.run(1, with_dropout, keyed)[0]
        for found in pool.run(2, with_dropout, keyed):
            assert (found == pytest.approx(alone, rel=1e-5)) == keyed


def mean_over_tokens(labels: Tensor) -> Tensor:
    """The gradient of a loss that is a mean over valid tokens, of which the replicas have different numbers."""
    torch.manual_seed(0)
    model = t3.prepare(nn.Linear(3, 4, bias=False), mesh=Mesh(Layout(dp=torch.distributed.get_world_size())))
    share = len(labels) // model.mesh.dp.size
    own = slice(model.mesh.dp.index * share, (model.mesh.dp.index + 1) * share)
    x = torch.linspace(-1, 1, len(labels) * 15).view(len(labels), 5, 3)
    loss = F.cross_entropy(model(x[own]).flatten(0, 1), labels[own].flatten(), ignore_index=-100)
    t3.backward(loss, count=(labels[own] != -100).sum())
    return model.weight.grad


def test_a_mean_over_valid_tokens_counts_tokens(pool) -> None:
    labels = torch.tensor([[0, 1, 2, 3, 0], [1, -100, -100, -100, -100], [2, 3, -100, -100, 1], [3, 0, 1, 2, 3]])
    expected = pool.run(1, mean_over_tokens, labels)[0]
    for found in pool.run(2, mean_over_tokens, labels):
        torch.testing.assert_close(found, expected)


def mean_over_none_of_a_replica(precision: str) -> tuple[Tensor, float]:
    """A mean of valid rows, of which the last replica has none: its own mean is 0 / 0."""
    torch.manual_seed(0)
    model = t3.prepare(nn.Linear(3, 4, bias=False), precision=precision)
    replicas = torch.distributed.get_world_size()
    own = slice(model.mesh.dp.index * 4 // replicas, (model.mesh.dp.index + 1) * 4 // replicas)
    x, valid = torch.linspace(-1, 1, 12).view(4, 3)[own], torch.tensor([True, True, False, False])[own]
    count = valid.sum()
    t3.backward((model(x).square().mean(1) * valid).sum() / count, count=count)
    return model.weight.grad, model.sync.loss


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("fp16", 1e-3)])
def test_a_replica_whose_loss_is_a_mean_of_nothing_adds_nothing(pool, precision: str, tolerance: float) -> None:
    gradient, loss = pool.run(1, mean_over_none_of_a_replica, precision)[0]
    for found in pool.run(2, mean_over_none_of_a_replica, precision):
        torch.testing.assert_close(found[0], gradient, rtol=tolerance, atol=tolerance)
        assert found[1] == pytest.approx(loss, rel=tolerance)


def zeroed_in_place(zero: bool) -> Tensor | str:
    """The weights after three updates of an optimizer that is not prepared and keeps the tensors of gradients."""
    torch.manual_seed(0)
    module = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = t3.prepare(module)
    replicas, index = model.mesh.dp.size, model.mesh.dp.index
    try:
        for step in range(3):
            x = (
                torch.linspace(-1, 1 + step, 12)
                .double()
                .view(4, 3)[index * 4 // replicas : (index + 1) * 4 // replicas]
            )
            t3.backward(model(x).square().mean())
            optimizer.step()
            if zero:
                optimizer.zero_grad(set_to_none=False)
    except t3.UserError as error:
        return str(error)
    return module.weight.detach()


def test_an_optimizer_that_is_not_prepared_may_fill_gradients_with_zeros(pool) -> None:
    expected = pool.run(1, zeroed_in_place, True)[0]
    for found in pool.run(2, zeroed_in_place, True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for found in pool.run(2, zeroed_in_place, False):
        assert found.startswith("threefold.backward was called before the gradients of the backward pass before")


def local_statistics() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = t3.prepare(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)), sync_batch_norm=False)
    x = torch.randn(4, 2) + torch.distributed.get_rank()
    out = model(x)
    t3.backward(out.mean())
    return out.detach(), model.state_dict()["0.running_mean"]


def test_statistics_of_a_replica_alone_on_request(pool) -> None:
    first, second = pool.run(2, local_statistics)
    assert first[0].mean() == pytest.approx(second[0].mean().item(), abs=1e-5)  # each normalized by itself
    assert torch.equal(first[1], second[1])


def drawn_after_prepare(tp: int) -> float:
    model = nn.Linear(4, 4, bias=False)
    torch.manual_seed(4)
    t3.prepare(model, mesh=Mesh(Layout(tp=tp)), tensor_parallel={})
    return float(torch.rand(()))


def test_preparing_draws_no_random_numbers(pool) -> None:
    """So that what a loader shuffles after it is the same in every layout."""
    assert set(pool.run(2, drawn_after_prepare, 2)) == set(pool.run(1, drawn_after_prepare, 1))

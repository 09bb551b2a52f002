"""Gradients summed over the replicas in 16 bits: half the bytes, a bounded error, equal bits on every replica."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.support import narrow_sums, part
from tests.planner.step_traffic import wire_bytes
from tests.support.parity import Case, make_engine, shard_of, whole_tensors
from tests.support.sweep import sweep
from threefold.comm.axis import Event
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.config.resolve import resolve
from threefold.dtypes import DTYPES
from threefold.errors import UserError
from threefold.parallel.compression import NarrowSum

NAMES = ["fp16", "bf16"]


@pytest.mark.parametrize("name", NAMES)
@sweep("replicas", [2, 3, 8], quick=(1,))
def test_the_error_is_bounded(pool, name: str, replicas: int) -> None:
    """Of gradients that fp16 cannot hold, too, whether too small or too large."""
    sizes = [1.0, 1e-20, 1e20, 3e-38 if name == "fp16" else 1e-30]
    ranks = pool.run(replicas, narrow_sums, name, sizes)
    unit = torch.finfo(DTYPES[name]).eps / 2
    for place, size in enumerate(sizes):
        parts = torch.stack([part(rank, size) for rank in range(replicas)]).double()
        exact, total = parts.sum(0), parts.abs().sum(0)
        lost = parts.abs().amax() * replicas**2 * 2.0**-39 if name == "fp16" else 1e-40  # below the smallest step
        error = (ranks[0][0][place].double() - exact).abs()
        assert (error <= 1.1 * replicas * unit * total + lost).all()
        assert error.max() > 0
        assert all(sums[place].equal(ranks[0][0][place]) for sums, _ in ranks)


def test_what_travels_is_half(pool) -> None:
    """Round a ring of n each rank sends 2(n − 1)/n of the copy's bytes; fp16 also agrees on one number a bucket."""
    for name, extra in (("bf16", []), ("fp16", [Event("dp", "all_reduce_max", 4)])):
        for _, events in pool.run(4, narrow_sums, name, [1.0]):
            assert events == [*extra, Event("dp", "all_reduce", 2 * 1001)]
    assert wire_bytes("all_reduce", 2 * 1001, 4) == 2 * 3 / 4 * 2002


def not_finite(name: str, value: float) -> Tensor:
    mesh = Mesh(Layout(dp=torch.distributed.get_world_size()))
    flat = torch.ones(5)
    if mesh.rank == 1:
        flat[3] = value
    NarrowSum(flat, mesh.dp, DTYPES[name]).finish()
    return flat


@sweep("value", [float("inf"), float("nan")], quick=(0,))
@pytest.mark.parametrize("name", NAMES)
def test_an_overflow_is_not_hidden(pool, name: str, value: float) -> None:
    for flat in pool.run(3, not_finite, name, value):
        assert not flat[3].isfinite()


def zeros(name: str) -> Tensor:
    mesh = Mesh(Layout(dp=torch.distributed.get_world_size()))
    flat = torch.zeros(5)
    NarrowSum(flat, mesh.dp, DTYPES[name]).finish()
    return flat


@pytest.mark.parametrize("name", NAMES)
def test_nothing_sums_to_nothing(pool, name: str) -> None:
    assert all(flat.tolist() == [0.0] * 5 for flat in pool.run(2, zeros, name))


def summed_on_tensor_ranks() -> Tensor:
    """Small values that tensor ranks have in common, summed in one bucket with large ones of their own."""
    mesh = Mesh(Layout(dp=2, tp=2))
    common = torch.randn(64, generator=torch.Generator().manual_seed(mesh.dp.index)) * 1e-5
    flat = torch.cat([common, torch.full((3,), 1000.0 ** (1 + mesh.tp.index))])
    NarrowSum(flat, mesh.dp, torch.float16, mesh.tp).finish()
    return flat[:64]


def test_tensor_ranks_round_what_they_have_in_common_alike(pool) -> None:
    first, *others = pool.run(4, summed_on_tensor_ranks)
    assert first.count_nonzero() > 10
    assert all(each.equal(first) for each in others)


Gradients = dict[str, Tensor]


def trained(case: Case) -> tuple[list[Gradients], Gradients, list[float]]:
    engine = make_engine(case)
    gradients, losses = [], []
    for step in range(3):
        loss, tokens = engine.compute_gradients(shard_of(case, step, engine.mesh.dp.index), step)
        gradients.append(whole_tensors(engine, "gradient"))
        losses.append(engine.update(loss, tokens, step).loss)
    return gradients, whole_tensors(engine, "master"), losses


def compressed(case: Case, name: str) -> Case:
    return replace(case, settings=(("parallel.gradient_compression", name),))


@pytest.mark.parametrize("name", NAMES)
@sweep("layout", [{"dp": 3}, {"dp": 2, "tp": 2, "pp": 2}, {"dp": 2, "cp": 2, "sequence": 12}], ids=str, quick=(1,))
def test_training_stays_near_and_replicas_stay_equal(pool, expected, name: str, layout: dict[str, int]) -> None:
    case = Case(dropout=0.1, **layout)
    exact = expected(case)
    ranks = pool.run(case.world_size, trained, compressed(case, name))
    unit = torch.finfo(DTYPES[name]).eps / 2
    for gradients, final, losses in ranks:
        assert losses == ranks[0][2]
        assert losses == pytest.approx(exact.losses, rel=10 * unit)
        wholes = {parameter: exact.gradients[0][parameter] for parameter in gradients[0]}
        off = [float((gradients[0][name] - whole).norm() / whole.norm()) for name, whole in wholes.items()]
        assert max(off) > 1e-6  # rounded, but by no more than that:
        assert all(each < 4 * case.dp * case.cp * unit for each in off)
        for other in (other for _, other, _ in ranks):
            assert all(other[parameter].equal(weight) for parameter, weight in final.items() if parameter in other)


def test_one_replica_rounds_nothing(pool) -> None:
    case = Case(dropout=0.1, tp=2)
    plain, rounded = pool.run(2, trained, case), pool.run(2, trained, compressed(case, "bf16"))
    assert [losses for *_, losses in plain] == [losses for *_, losses in rounded]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"parallel": {"zero": 2, "dp": 2}},
            "gradient_compression is fp16 but parallel.zero is 2, which would also add",
        ),
        ({"precision": {"dtype": "fp64"}}, "gradient_compression is fp16 but precision.dtype is fp64"),
        ({"precision": {"dtype": "bf16", "master_weights": False}}, "is fp16 but precision.master_weights is false"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], sentence: str) -> None:
    given = {"data": {"path": "unused"}, **settings}
    given["parallel"] = {**settings.get("parallel", {}), "gradient_compression": "fp16"}
    with pytest.raises(UserError, match=sentence):
        resolve(Config.model_validate(given), 67)

"""One rank on a GPU against one process on the CPU: weights, dropout, losses, gradients, in each precision."""

from dataclasses import replace

import pytest
import torch

from tests.models.masks_by_hand import dropout_factors
from tests.support.devices import DEVICES, alone_on, device_of
from tests.support.parity import (
    LLAMA,
    MOE,
    Case,
    departures,
    in_layout,
    make_engine,
    narrow_departures,
    shard_of,
    whole_tensors,
    with_recompute,
)
from tests.support.sweep import sweep
from threefold.random.dropout import Dropout, keep_mask, sample_keys
from threefold.train.step import StepResult
from threefold.verify.compare import relative_error

GPT = Case(dropout=0.1, steps=2)
CASES = {
    "gpt": GPT,
    "gpt, fp64": replace(GPT, dtype="fp64"),
    "gpt, untied, rope": replace(GPT, tie=False, positions="rope", head_dim=4, dropout=0.0),
    "gpt, packed documents": replace(GPT, documents=True),
    "gpt, chunked loss": replace(GPT, settings=(("train.loss_chunk_size", 5),)),
    "gpt, full recompute": with_recompute(GPT, "full"),
    "gpt, selective recompute": with_recompute(GPT, "selective"),
    "gpt, no dropout": replace(GPT, dropout=0.0),
    "gpt, Muon": replace(GPT, optimizer="muon"),
    "llama, window, packed documents": replace(LLAMA, dtype="fp32"),
    "llama, fp64": LLAMA,
    "mixture": replace(MOE, dtype="fp32"),
    "mixture, wide experts": replace(
        MOE,
        dtype="fp32",
        heads=8,
        head_dim=4,
        model=(*MOE.model, ("num_key_value_heads", 4), ("expert_ffn_hidden_size", 16)),
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_one_rank(pool, expected, name: str, device: str) -> None:
    """Relative errors of at most 1e-5 in fp32, without TF32, and 1e-12 in fp64."""
    case = replace(CASES[name], device=device)
    found = departures(expected(case), pool.run(1, alone_on, device, in_layout, case), case)
    assert not found, "\n".join(found[:10])


@pytest.mark.parametrize("device", DEVICES)
@sweep("chunk", [0, 5], ids=["whole loss", "chunked loss"], slow=(0,))
def test_compiled(pool, expected, chunk: int, device: str) -> None:
    settings = (("train.loss_chunk_size", chunk),)
    case = Case(steps=2, dropout=0.1, compile=True, layers=1, settings=settings, device=device)
    found = departures(expected(case), pool.run(1, alone_on, device, in_layout, case), case)
    assert not found, "\n".join(found[:10])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "limit"), [("bf16", 1.5e-2), ("fp16", 3e-3)])
def test_narrow_gradients_are_those_of_fp32_to_what_the_dtype_rounds(
    pool, expected, dtype: str, limit: float, device: str
) -> None:
    case = Case(dtype=dtype, dropout=0.1, steps=1, device=device)
    exact = expected(replace(case, dtype="fp32"))
    assert not narrow_departures(exact, pool.run(1, alone_on, device, in_layout, case), limit)


def steps_with_scale(case: Case, scale: float, count: int) -> list[StepResult]:
    engine = make_engine(case)
    assert engine.loss_scale is not None
    engine.loss_scale.value = scale
    return [engine.train_step(shard_of(case, step, 0), step) for step in range(count)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_scale_that_is_too_large_falls_until_the_gradients_fit(pool, device: str) -> None:
    case = Case(dtype="fp16", dropout=0.1, device=device)
    (results,) = pool.run(1, alone_on, device, steps_with_scale, case, 2.0**30, 20)
    skipped = [result.skipped for result in results]
    assert skipped[0]
    assert not skipped[-1]
    scales = [result.loss_scale for result in results]
    assert scales[: skipped.index(False) + 1] == [2.0 ** (30 - step) for step in range(skipped.index(False) + 1)]


def initial_weights(case: Case) -> dict[str, torch.Tensor]:
    return whole_tensors(make_engine(case), "master")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_initial_weights_are_the_cpus(pool, dtype: str, device: str) -> None:
    """The same bits in fp32: a logarithm and a cosine in fp64 may differ in a last bit, which rounding drops."""
    case = Case(dtype=dtype, layers=6, ffn=240)
    (theirs,) = pool.run(1, initial_weights, case)
    (ours,) = pool.run(1, alone_on, device, initial_weights, replace(case, device=device))
    assert theirs.keys() == ours.keys()
    for name, weight in theirs.items():
        if dtype == "fp64":
            assert relative_error(ours[name], weight) < 1e-14, name
        else:
            assert weight.dtype == torch.float32
            assert weight.equal(ours[name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_masks_are_the_cpus(pool, device: str) -> None:
    """And those of the rule, worked out by hand."""
    pool.run(1, compare_masks, device)


def compare_masks(device: str) -> None:
    for step, shape in enumerate([(3, 7, 5), (2, 65, 129), (4, 3, 33, 33)]):
        rows, dropout = torch.arange(shape[0]) * 1000 + step, Dropout(0.3, f"blocks.{step}.dropout.mlp")
        expected = dropout_factors(11, step, rows.tolist(), dropout.name, shape, 0.3) > 0
        assert 0.5 < expected.double().mean() < 0.9
        for place in ("cpu", device):
            keys = sample_keys(11, step, rows).to(device_of(place))
            kept = keep_mask(keys, dropout.site, torch.Size(shape), 0.3)
            assert kept.device.type == place
            assert kept.cpu().equal(expected)
            dropped = dropout(torch.ones(shape, device=keys.device), keys)
            assert (dropped > 0).cpu().equal(expected)

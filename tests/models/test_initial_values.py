"""Initial values against the distribution that the documentation states, and against Philox by hand; and no two
parameters' numbers alike, which a comparison of layouts with one process cannot see."""

from collections.abc import Iterator
from hashlib import blake2b
from itertools import combinations
from math import prod, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tests.support.parity import Case, make_engine
from threefold.config import Config, resolve
from threefold.models.family import make_model, model_plan
from threefold.models.source import drawn as drawn_by
from threefold.parallel.parameter import draw_, offset
from threefold.verify.worker_pool import WorkerPool

RANGE, LAYERS, SEED = 0.05, 3, 8
SIZES: dict[str, Any] = {"num_layers": LAYERS, "hidden_size": 48, "num_attention_heads": 4, "ffn_hidden_size": 80}
SIZES |= {"vocab_size": 131, "max_position_embeddings": 40, "initializer_range": RANGE, "tie_embeddings": False}
LLAMA = SIZES | {"architecture": "llama", "num_key_value_heads": 2, "qkv_bias": True, "qk_norm": True}
MODELS = {
    "gpt": SIZES,
    "llama": LLAMA,
    "mixture": LLAMA
    | {"num_experts": 3, "dense_layers": 1, "expert_ffn_hidden_size": 24}
    | {"shared_expert_ffn_hidden_size": 32, "shared_expert_gate": True},
}
NARROW = ("attn.proj.weight", "mlp.down.weight", "mlp.shared.down.weight", "mlp.experts.down")
"""What joins the residual stream, in which 2 · layers of them add up."""
SIGMAS = 5.0
"""Within how many standard errors an estimate has to be; the numbers are the same in every run."""


def drawn(model: str, seed: int = SEED) -> dict[str, Tensor]:
    given = {"model": MODELS[model], "data": {"path": "unused", "sequence_length": 16}}
    settings = resolve(Config.model_validate(given), SIZES["vocab_size"]).model
    plan = model_plan(settings, 16)
    parameters = dict(make_model(settings).double().named_parameters())
    for name, parameter in parameters.items():
        draw_(parameter, parameter, name, plan, seed)
    return {name: parameter.detach() for name, parameter in parameters.items()}


def normal(values: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, float]]:
    """The parameters that are random, each with its stated standard deviation."""
    for name, value in values.items():
        if not name.endswith(("norm.weight", ".bias")):
            yield name, value.flatten(), RANGE / sqrt(2 * LAYERS) if name.endswith(NARROW) else RANGE


@pytest.mark.parametrize("model", MODELS)
def test_each_parameter_is_normal_with_its_width(model: str) -> None:
    """N(0, range²), narrower by 1 / √(2 · layers) where a layer's output joins the residual stream."""
    widths = set()
    for name, value, std in normal(drawn(model)):
        n = len(value)
        widths.add(std)
        assert abs(value.mean()) < SIGMAS * std / sqrt(n), name
        assert abs(value.std() / std - 1) < SIGMAS / sqrt(2 * n), name
        assert abs((value / std).pow(3).mean()) < SIGMAS * sqrt(15 / n), name
        assert abs((value / std).pow(4).mean() - 3) < SIGMAS * sqrt(96 / n), name
        ordered = (value / std).sort().values  # Kolmogorov and Smirnov's largest distance of distribution functions
        below = (1 + torch.erf(ordered / sqrt(2))) / 2
        assert (below - (torch.arange(n) + 0.5) / n).abs().max() < 2 / sqrt(n), name
    assert len(widths) == 2


@pytest.mark.parametrize("model", MODELS)
def test_norms_are_one_and_biases_zero(model: str) -> None:
    values = drawn(model)
    norms = {name: value for name, value in values.items() if name.endswith("norm.weight")}
    biases = {name: value for name, value in values.items() if name.endswith(".bias")}
    assert all(value.eq(1).all() for value in norms.values())
    assert all(value.eq(0).all() for value in biases.values())
    assert len(norms) == 1 + LAYERS * (2 if model == "gpt" else 4)
    assert len(biases) == (1 + LAYERS * 6 if model == "gpt" else LAYERS)


def largest_correlation(one: Tensor, other: Tensor) -> Tensor:
    """In standard errors, of all shifts of one against the other."""
    n = max(len(one), len(other))
    parts = [
        torch.fft.rfft(torch.nn.functional.pad(each / each.std(), (0, 2 * n - len(each)))) for each in (one, other)
    ]
    found = torch.fft.irfft(parts[0] * parts[1].conj(), n=2 * n).abs()
    return found.max() / sqrt(min(len(one), len(other)))


@pytest.mark.parametrize("model", MODELS)
def test_no_two_parameters_have_numbers_in_common(model: str) -> None:
    """Neither at the same place nor shifted, nor one layer's with the next one's; nor with those of another seed."""
    values = {name: value for name, value, _ in normal(drawn(model))}
    assert len(values) > 4 * LAYERS
    others = {name: value for name, value, _ in normal(drawn(model, SEED + 1))}
    pairs = [((a, values[a]), (b, values[b])) for a, b in combinations(values, 2)]
    pairs += [((a, values[a]), (f"{a} of another seed", others[a])) for a in values]
    for (a, one), (b, other) in pairs:
        assert largest_correlation(one, other) < 7, (a, b)
    name = "blocks.0.attn.qkv.weight"
    same = values[name]
    assert largest_correlation(same, same.roll(48)) > 50  # as it would be found
    # Nor does a parameter repeat itself.
    spectrum = torch.fft.rfft(torch.nn.functional.pad(same / same.std(), (0, len(same)))).abs().square()
    assert torch.fft.irfft(spectrum)[1 : len(same)].abs().max() < 7 * sqrt(len(same))


def test_they_are_philox_numbers_of_seed_name_and_place() -> None:
    values = drawn("llama")
    for name in ("blocks.1.attn.proj.weight", "head.output.weight"):
        std = RANGE / sqrt(2 * LAYERS) if name.endswith(NARROW) else RANGE
        np.testing.assert_allclose(values[name].flatten().numpy(), by_hand(name, values[name].numel()) * std, rtol=1e-9)


def test_what_a_function_draws_follows_from_seed_and_name() -> None:
    """As with `nn.init.xavier_uniform_` in a plan."""
    places = [("a", SEED), ("b", SEED), ("a", SEED + 1)]
    values = [drawn_by(torch.nn.init.normal_, name, (40, 30), seed).flatten() for name, seed in places]
    for one, other in combinations(values, 2):
        assert largest_correlation(one, other) < 7
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert drawn_by(torch.nn.init.normal_, "a", (40, 30), SEED).flatten().equal(values[0])
    assert torch.get_rng_state().equal(before)


def by_hand(name: str, count: int) -> npt.NDArray[np.float64]:
    """Philox2x32-10 of each place under a key of seed and name, and one number of Box and Muller's pair."""
    text = f"str:weights\x1fint:{SEED}\x1fstr:{name}".encode()
    key = int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1
    low, high = np.arange(count, dtype=np.uint64), np.full(count, key >> 32, np.uint64)
    round_key, mask = key & 0xFFFFFFFF, np.uint64(0xFFFFFFFF)
    for _ in range(10):
        product = low * np.uint64(0xD256D193)
        low, high = (product >> np.uint64(32)) ^ high ^ np.uint64(round_key), product & mask
        round_key = round_key + 0x9E3779B9 & 0xFFFFFFFF
    first, second = ((each.astype(np.float64) + 0.5) / 2**32 for each in (low, high))
    return np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)


def shards(case: Case) -> dict[str, tuple[tuple[int, ...], Tensor]]:
    """Of each parameter of this rank, where its part begins, and the part."""
    entries = make_engine(case).optimizer.entries
    return {entry.name: (offset(entry.parameter), entry.master.detach()) for entry in entries}


@pytest.mark.parametrize("layout", [(1, 3, 1), (1, 2, 2)], ids=str)
def test_a_ranks_values_are_a_slice_of_the_whole(pool: WorkerPool, layout: tuple[int, int, int]) -> None:
    case = Case(dtype="fp64", tie=False).with_layout(*layout)
    (whole,) = pool.run(1, shards, case.unsplit)
    covered = dict.fromkeys(whole, 0)
    for rank in pool.run(case.world_size, shards, case):
        for name, (start, part) in rank.items():
            at = tuple(slice(first, first + size) for first, size in zip(start, part.shape, strict=True))
            assert part.equal(whole[name][1][at]), name
            covered[name] += part.numel()
    split = {name for name, count in covered.items() if count == prod(whole[name][1].shape)}
    assert {"embed.tokens.weight", "blocks.0.attn.qkv.weight", "blocks.2.mlp.down.weight"} <= split
    assert all(count >= prod(whole[name][1].shape) for name, count in covered.items())

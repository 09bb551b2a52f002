"""Rotary frequencies against the papers' formulas, worked out slowly, one pair at a time."""

import cmath
from math import ceil, floor, log, pi

import pytest
import torch

from threefold.models.layers.attention import Rotary
from threefold.models.layers.rope_scaling import RopeScaling, frequencies
from threefold.random.rng import Slice

SIZES = [(64, 10000.0), (128, 500000.0), (10, 100.0)]
METHODS = [
    RopeScaling("linear", 4.0, 512),
    RopeScaling("dynamic", 2.0, 512),
    RopeScaling("llama3", 8.0, 512, low_frequency_factor=1.0, high_frequency_factor=4.0),
    RopeScaling("llama3", 32.0, 8192, low_frequency_factor=2.0, high_frequency_factor=5.0),
    RopeScaling("yarn", 16.0, 512, beta_fast=32.0, beta_slow=1.0),
    RopeScaling("yarn", 4.0, 4096, beta_fast=20.0, beta_slow=2.0),
    RopeScaling("yarn", 32.0, 4096, truncate=False),
]
LONG = [
    RopeScaling(
        "longrope",
        4.0,
        512,
        short_factors=tuple(1 + pair / 100 for pair in range(head_dim // 2)),
        long_factors=tuple(2.5 + pair / 7 for pair in range(head_dim // 2)),
    )
    for head_dim, _ in SIZES
]


def plain(head_dim: int, theta: float) -> list[float]:
    """Su et al., arXiv 2104.09864, equation 15."""
    return [theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]


def slow(head_dim: int, theta: float, scaling: RopeScaling, length: int) -> list[float]:
    original, factor = scaling.original_positions, scaling.factor
    if scaling.method == "linear":  # Chen et al., arXiv 2306.15595, equation 4: position m becomes m · L / L'
        return [1 / factor * turn for turn in plain(head_dim, theta)]
    if scaling.method == "dynamic":  # the base for the sequence's own length, as soon as that is too long
        if length <= original:
            return plain(head_dim, theta)
        base = theta * (factor * length / original - (factor - 1)) ** (head_dim / (head_dim - 2))
        return plain(head_dim, base)
    if scaling.method == "llama3":
        return [llama3(turn, scaling) for turn in plain(head_dim, theta)]
    if scaling.method == "longrope":  # Ding et al., arXiv 2402.13753, equation 4, as Phi-3 has it
        factors = scaling.short_factors if length <= original else scaling.long_factors
        return [1 / factor * turn for factor, turn in zip(factors, plain(head_dim, theta), strict=True)]
    return yarn(head_dim, theta, scaling)


def llama3(turn: float, scaling: RopeScaling) -> float:
    """By wavelength, as in Meta's code for Llama 3.1."""
    wavelength = 2 * pi / turn
    if wavelength < scaling.original_positions / scaling.high_frequency_factor:
        return turn
    if wavelength > scaling.original_positions / scaling.low_frequency_factor:
        return turn / scaling.factor
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    smooth = (scaling.original_positions / wavelength - scaling.low_frequency_factor) / span
    return (1 - smooth) * turn / scaling.factor + smooth * turn


def yarn(head_dim: int, theta: float, scaling: RopeScaling) -> list[float]:
    """Peng et al., arXiv 2309.00071, section 3.2, with the ramp over pairs of the authors' code."""

    def pair_that_turns(times: float) -> float:
        # times = original / wavelength and wavelength = 2π · theta^(2 · pair / head_dim), solved for the pair
        return head_dim / 2 * log(scaling.original_positions / (2 * pi * times), theta)

    begin, end = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        begin, end = floor(begin), ceil(end)
    begin, end = max(begin, 0), min(end, head_dim - 1)
    found = []
    for pair, turn in enumerate(plain(head_dim, theta)):
        divided = min(max((pair - begin) / (end - begin), 0.0), 1.0)
        found.append(divided * turn / scaling.factor + (1 - divided) * turn)
    return found


def exact(found: torch.Tensor, expected: list[float]) -> None:
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=0)


@pytest.mark.parametrize(("head_dim", "theta"), SIZES)
def test_frequencies(head_dim: int, theta: float) -> None:
    exact(frequencies(head_dim, theta, RopeScaling(), 4096), plain(head_dim, theta))
    for scaling in (*METHODS, *(each for each in LONG if 2 * len(each.long_factors) == head_dim)):
        for length in (100, 512, 513, 4096):
            exact(frequencies(head_dim, theta, scaling, length), slow(head_dim, theta, scaling, length))


def test_every_part_of_the_ramps_is_reached() -> None:
    """So that the comparison above is one: some frequencies stay, some are divided fully, some in part."""
    for scaling in METHODS[2:]:
        head_dim, theta = SIZES[1] if scaling.original_positions > 512 else SIZES[0]
        ratios = (frequencies(head_dim, theta, scaling, 1) / frequencies(head_dim, theta, RopeScaling(), 1)).tolist()
        assert ratios[0] == pytest.approx(1, abs=1e-15)
        assert ratios[-1] == pytest.approx(1 / scaling.factor, rel=1e-14)
        assert any(1.01 / scaling.factor < ratio < 0.99 for ratio in ratios)


def test_yarn_keeps_what_turns_often_and_divides_what_turns_seldom() -> None:
    """The paper's conditions on the turns within the original length, whatever the ramp between is."""
    scaling = METHODS[4]
    for turn, found in zip(plain(128, 10000.0), frequencies(128, 10000.0, scaling, 1).tolist(), strict=True):
        turns = scaling.original_positions * turn / (2 * pi)
        if turns > scaling.beta_fast:
            assert found == pytest.approx(turn, rel=1e-14)
        if turns < scaling.beta_slow:
            assert found == pytest.approx(turn / scaling.factor, rel=1e-14)


@pytest.mark.parametrize("first", [0, 5])
def test_queries_and_keys_turn_by_their_positions(first: int) -> None:
    """Element i of the first half and element i of the second are one complex number, which turns."""
    head_dim, theta, length = 6, 50.0, 7
    scaling = RopeScaling("yarn", 4.0, 64, attention_factor=1.3)
    rotary = Rotary(head_dim, theta, scaling, Slice(first, first + length))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, length, 3, head_dim, generator=generator, dtype=torch.float64)
    k = torch.randn(2, length, 1, head_dim, generator=generator, dtype=torch.float64)
    turns = slow(head_dim, theta, scaling, first + length)
    for given, found in zip((q, k), rotary(q, k), strict=True):
        expected = torch.empty_like(given)
        for batch, position, head in (
            (b, p, h) for b in range(2) for p in range(length) for h in range(given.shape[2])
        ):
            row = given[batch, position, head].tolist()
            for pair in range(head_dim // 2):
                turned = 1.3 * complex(row[pair], row[pair + 3]) * cmath.exp(1j * (first + position) * turns[pair])
                expected[batch, position, head, pair] = turned.real
                expected[batch, position, head, pair + 3] = turned.imag
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)

"""How far two tensors differ, and how much of that counts as rounding."""

import pytest
import torch

from tests.support.kept import kept_of
from threefold.parity.measure import Measure, Tolerances, measure
from threefold.parity.record import GRADIENT, UPDATE
from threefold.parity.sketch import PARAMETER


def test_a_part_that_is_wrong_shows_at_its_own_size() -> None:
    """A sixteenth of a vector that is doubled differs by 1 there, and by a quarter as a part of the whole."""
    right = torch.randn(512, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).sign()
    wrong = right.clone()
    wrong[64:96] *= 2
    assert measure(kept_of(wrong, PARAMETER), kept_of(right, PARAMETER)).error == pytest.approx(1.0)


def test_a_part_that_is_nearly_zero_is_measured_against_the_whole() -> None:
    right = torch.ones(512, dtype=torch.float64)
    right[64:96] = 1e-12
    wrong = right.clone()
    wrong[64:96] *= 2
    assert measure(kept_of(wrong, PARAMETER), kept_of(right, PARAMETER)).error < 1e-11


def test_no_noise_earns_an_update_a_tolerance_that_hides_another_one() -> None:
    """An update with all signs flipped differs by 2; however noisy it is, 4 is the most that counts as rounding."""
    tolerances = Tolerances("float32", runs=1)
    for kind in (UPDATE, GRADIENT):
        tolerances.learn(2, kind, "weight", Measure(error=1.5, scale=2.5))
    found, free = tolerances.of(2, UPDATE, "weight"), tolerances.of(2, GRADIENT, "weight")
    assert (found.error, found.scale) == (4.0, 4.0)
    assert (free.error, free.scale) == (30.0, 30.0)

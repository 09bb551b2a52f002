"""How far two tensors differ, and how much of that counts as rounding."""

import pytest
import torch
from parity_support import kept_of

from threefold_parity.measure import Measure, Tolerances, last_places, least_magnitudes, measure
from threefold_parity.record import GRADIENT, INITIAL, OUTPUT, UPDATE, Quantity
from threefold_parity.sketch import PARAMETER, grid, signs


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


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_errors_outside_of_the_grid_show_in_projections_even_if_their_sums_cancel() -> None:
    right = random(200, 150)
    rows, columns = (
        [place for place in range(size) if place not in set(grid((200, 150), PARAMETER)[dim].tolist())]
        for dim, size in enumerate((200, 150))
    )
    row, other_row = (next(place for place in rows if signs(200)[place] == sign) for sign in (1, -1))
    column, other_column = (next(place for place in columns if signs(150)[place] == sign) for sign in (1, -1))
    wrong = right.clone()
    for at, amount in (((row, column), 50), ((row, other_column), -50), ((other_row, column), -50)):
        wrong[at] += amount
    wrong[other_row, other_column] += 50
    assert torch.allclose(wrong.sum(0), right.sum(0))
    assert torch.allclose(wrong.sum(1), right.sum(1))
    assert measure(kept_of(wrong, PARAMETER), kept_of(right, PARAMETER)).error > 0.5


def test_errors_are_relative_to_the_reference_and_factors_those_of_the_candidate() -> None:
    right = random(20, 30)
    found = measure(kept_of(1000 * right, PARAMETER), kept_of(right, PARAMETER))
    assert (found.error, found.scale) == (pytest.approx(999.0), pytest.approx(1000.0))


def test_the_largest_noise_of_all_runs_counts() -> None:
    tolerances = Tolerances("float32", runs=2)
    for error in (0.2, 0.1):
        tolerances.learn(1, GRADIENT, "weight", Measure(error, 1.0))
    assert tolerances.of(1, GRADIENT, "weight").error == pytest.approx(6 * 0.2)


def test_noise_that_is_learned_later_counts_for_all_tensors() -> None:
    tolerances = Tolerances("float32", runs=1)
    tolerances.learn(1, GRADIENT, "weight", Measure(0.001, 1.0))
    assert tolerances.of(1, GRADIENT, "weight").error == pytest.approx(6 * 0.001)
    for name in "abcdefghijk":
        tolerances.learn(1, GRADIENT, name, Measure(0.1, 1.0))
    assert tolerances.of(1, GRADIENT, "weight").error == pytest.approx(6 * 0.1)


def test_without_noise_tolerances_grow_from_the_second_step_on() -> None:
    tolerances = Tolerances("float32")
    found = [tolerances.of(step, OUTPUT, "block").error for step in (0, 1, 2, 3)]
    assert found == pytest.approx([1e-4, 1e-4, 3e-4, 9e-4])


def quantity(kind: str, name: str, value: float) -> Quantity:
    return Quantity(kind, name, "", 0, kept_of(torch.full((8,), value, dtype=torch.float64), PARAMETER))


def test_small_tensors_are_measured_against_the_largest_of_their_kind() -> None:
    found = least_magnitudes([quantity(GRADIENT, "a", 2.0), quantity(GRADIENT, "b", 1e-9), quantity(UPDATE, "a", 0.5)])
    assert found == pytest.approx({GRADIENT: 2e-3, UPDATE: 5e-4})


def test_updates_are_measured_against_the_last_place_of_the_widest_dtype_error() -> None:
    weights = [quantity(INITIAL, "a", 2.0), quantity(INITIAL, "b", 4.0), quantity(UPDATE, "a", 1.0)]
    found = last_places(weights, [("a", "bfloat16"), ("a", "float32"), ("b", "float32")])
    assert found == pytest.approx({"a": 2 * 2**-7, "b": 4 * 2**-23})

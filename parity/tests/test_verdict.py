"""Which of several departures a verdict names."""

import pytest

from threefold_parity.departure import Departure, Findings
from threefold_parity.record import GRADIENT, OUTPUT
from threefold_parity.verdict import judge


def departures(kind: str, *names: str, copies: str = "") -> Findings:
    return Findings([Departure(1, kind, name, 0.5, 1e-6, copies=name == copies) for name in names], steps=1)


@pytest.mark.parametrize(("kind", "first"), [(OUTPUT, "a"), (GRADIENT, "c")])
def test_the_one_that_is_computed_first_is_named(kind: str, first: str) -> None:
    """Quantities come in the order of the forward pass, and gradients are computed from the last on."""
    verdict = judge(departures(kind, "a", "b", "c"))
    assert verdict.first is not None
    assert verdict.first.name == first
    assert {each.name for each in verdict.together} == {"a", "b", "c"}


def test_one_that_ranks_disagree_about_is_named_before_others() -> None:
    verdict = judge(departures(GRADIENT, "a", "b", "c", copies="a"))
    assert verdict.first is not None
    assert verdict.first.name == "a"

"""The measure of the proof: each error against the largest element, and the verdict that follows from the errors."""

from math import inf, nan

import pytest
import torch
from torch import Tensor

from tests.verify.support import task
from threefold.comm.layout import parse
from threefold.verify.compare import GRADIENT, LOSS, SMALL, WEIGHT, Comparison, Error, Held, relative_error
from threefold.verify.rank_worker import CHECKS, RankReport
from threefold.verify.reference import Trace
from threefold.verify.verifier import DEPARTS, EQUAL, UNSPLIT, LayoutResult, judge

WHOLE = torch.tensor([[4.0, -8.0, 2.0], [1.0, 0.5, -0.25]])
TINY = WHOLE * 1e-5


def trace(leverage: dict[str, Tensor] | None = None) -> Trace:
    tensors = {"large": WHOLE, "tiny": TINY}
    return Trace(tensors, [1e-3], [2.0], [tensors], [tensors], leverage or {}, coefficients=[0.5])


def held(**dims: tuple[tuple[int, int], tuple[int, int]]) -> dict[str, Held]:
    """Parts of parameters, by their start and shape."""
    return {name: Held(name, 0, start, shape) for name, (start, shape) in dims.items()}


BOTH = held(large=((0, 0), (2, 3)), tiny=((0, 0), (2, 3)))


def moved(tensor: Tensor, by: float, place: tuple[int, int] = (1, 1)) -> Tensor:
    changed = tensor.clone()
    changed[place] += by
    return changed


@pytest.mark.parametrize("by", [0.25, -0.25])
def test_an_error_is_relative_to_the_largest_element(by: float) -> None:
    """Neither to the sum of the elements nor to their norm, which grow with a tensor and hide errors in large ones."""
    assert relative_error(moved(WHOLE, by), WHOLE) == 0.25 / 8
    assert relative_error(moved(WHOLE, by), WHOLE, scale=2.0) == 0.25 / 2
    assert relative_error(torch.tensor([by]), torch.zeros(1)) == 0.25  # nothing to measure by
    assert relative_error(torch.ones(0), torch.ones(0)) == 0.0
    many = torch.ones(10_000, dtype=torch.float64)
    assert relative_error(moved(many.view(100, 100), 1e-11), many.view(100, 100)) > 0.9e-11
    comparison = Comparison(trace(), BOTH, 0)
    comparison.gradients(0, {"large": moved(WHOLE, by)})
    comparison.initial({"large": moved(WHOLE, by)})
    comparison.clipped(0, {"large": moved(WHOLE * 0.5, by)})
    comparison.weights(0, {"large": moved(WHOLE, by)})
    assert [error.relative for error in comparison.errors] == [0.25 / 8, 0.25 / 8, 0.25 / 4, 0.25 / 8]


def test_a_part_is_measured_by_the_whole_tensor() -> None:
    """A rank whose part is small does not see larger errors than its neighbours."""
    lower = held(large=((1, 1), (1, 2)))
    comparison = Comparison(trace(), lower, 3)
    comparison.gradients(0, {"large": moved(WHOLE[1:, 1:], 0.25, (0, 1))})
    (error,) = comparison.errors
    assert (error.what, error.parameter, error.step, error.relative) == (GRADIENT, "large", 1, 0.25 / 8)


def test_a_tensor_of_noise_is_measured_by_a_share_of_the_model() -> None:
    for floor, scale in ((SMALL, 8 * SMALL), (0.0, 8e-5)):
        comparison = Comparison(trace(), BOTH, 0, floor)
        comparison.gradients(0, {"tiny": moved(TINY, 1e-6)})
        assert comparison.errors[0].relative == pytest.approx(1e-6 / scale, rel=0.05), floor
        comparison.gradients(0, {"large": moved(WHOLE, 0.25)})
        assert comparison.errors[1].relative == 0.25 / 8, "a large one is not"


def test_numbers_are_measured_by_themselves() -> None:
    """Also those far below 1."""
    comparison = Comparison(trace(), {}, 0)
    comparison.scalars(0, 1.1e-3, 1.9)
    comparison.number(LOSS, 0, -0.5, 0.0)
    assert [error.relative for error in comparison.errors] == pytest.approx([0.1, 0.05, 0.5])


def test_a_weight_is_allowed_what_its_own_gradient_could_move_it() -> None:
    leverage = torch.zeros(2, 3)
    leverage[0, 0] = 92.0
    comparison = Comparison(trace({"large": leverage}), BOTH, 0)
    for place in ((0, 0), (1, 1)):
        comparison.weights(0, {"large": moved(WHOLE, 1.0, place)})
    comparison.weights(0, {"tiny": TINY})
    assert [(error.what, error.relative) for error in comparison.errors] == [
        (WEIGHT, pytest.approx(1 / 100)),
        (WEIGHT, pytest.approx(1 / 8)),
        (WEIGHT, 0.0),
    ]


def test_an_export_lacks_nothing() -> None:
    comparison = Comparison(trace(), {}, 0)
    expected = comparison.expected.weights[0]
    comparison.exported(0, {"large": WHOLE}, expected, {})
    comparison.exported(0, {"large": WHOLE.t(), "tiny": TINY}, expected, {})
    assert [error.relative for error in comparison.errors] == [0.0, inf, inf, 0.0]


def reported(*errors: Error, rank: int = 0, cut: tuple[str, ...] = ("tp",), names: str = "abc") -> RankReport:
    parts = [Held(name, 0, (rank,), (1,)) for name in names]
    return RankReport([*errors, Error(LOSS, "", 1, 1e-15, rank)], parts, {"tp": 8 * rank}, frozenset(cut))


def judged(*reports: RankReport, layout: str = "tp2", missing: str | None = None) -> LayoutResult:
    return judge(parse(layout), list(reports), ["a", "b", "c"], 1e-12, 1.0, missing)


def test_one_error_of_any_rank_above_the_tolerance_departs() -> None:
    for relative, verdict in ((1e-12, EQUAL), (1.1e-12, DEPARTS), (inf, DEPARTS), (nan, DEPARTS)):
        result = judged(reported(), reported(Error(GRADIENT, "b", 2, relative, 1), rank=1))
        assert result.verdict == verdict, relative
        assert (result.first is None) == (verdict == EQUAL)
    assert result.first is not None
    assert (result.first.parameter, result.first.tp, result.first.rank) == ("b", 1, 1)


def test_elements_that_nobody_compared_depart_without_an_error() -> None:
    result = judged(reported(), reported(rank=1), missing="the ranks together hold 3 different elements of w")
    assert (result.verdict, result.first) == (DEPARTS, None)
    assert result.message == "the ranks together hold 3 different elements of w"


def test_the_first_departure_is_the_earliest_and_not_the_largest() -> None:
    found = [
        Error(WEIGHT, "a", 1, 1.0, 0),
        Error(GRADIENT, "c", 1, 1e-9, 0),
        Error(GRADIENT, "b", 1, 1e-8, 0),
        Error(GRADIENT, "a", 2, 2.0, 0),
        Error(GRADIENT, "a", 1, 3.0, 0, check=CHECKS[0]),
    ]
    result = judged(reported(*found), reported(rank=1))
    assert result.first == Error(GRADIENT, "b", 1, 1e-8, 0)
    assert result.worst is not None
    assert result.worst.relative == 3.0
    assert result.departing == ("a", "b", "c")
    assert result.nearest_to_loss == "c"
    assert result.by_parameter == (("a", 3.0), ("b", 1e-8), ("c", 1e-9))
    wrong_loss = judged(reported(*found, Error(LOSS, "", 1, 0.1, 0)), reported(rank=1))
    assert wrong_loss.nearest_to_loss == ""


@pytest.mark.parametrize(
    ("layout", "cut", "names", "idle"),
    [
        ("tp2", ("tp",), ("abc", "abc"), ""),
        ("tp2", (), ("abc", "abc"), "nothing is split over tp: every rank of it holds the same parameters"),
        ("pp2", (), ("ab", "c"), ""),
        ("pp2", (), ("abc", "abc"), "nothing is split over pp"),
        ("dp2", (), ("abc", "abc"), ""),
        ("dp2 zero3", (), ("abc", "abc"), "nothing is split over zero"),
        ("dp2 zero3", ("dp",), ("abc", "abc"), ""),
        ("tp2·pp2", ("dp",), ("abc", "abc"), "nothing is split over tp and pp"),
    ],
)
def test_an_axis_that_splits_nothing_proves_nothing(
    layout: str, cut: tuple[str, ...], names: tuple[str, str], idle: str
) -> None:
    result = judged(*(reported(rank=n, cut=cut, names=each) for n, each in enumerate(names)), layout=layout)
    assert result.verdict == (UNSPLIT if idle else EQUAL)
    assert result.message.startswith(idle)
    assert bool(result.message) == bool(idle)


def test_what_counts_as_rounding() -> None:
    assert (task("dp2").tolerance, task("dp2", dtype="fp32").tolerance) == (1e-12, 1e-5)

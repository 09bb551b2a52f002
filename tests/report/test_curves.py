"""Curves of any length have a limited number of points and keep every extreme."""

import json

import pytest

from threefold.report.curves import Curves, sparkline


def test_few_steps_are_kept_as_they_are() -> None:
    curves = Curves(most=4)
    for step, loss in enumerate([5.0, None, float("nan"), 3.0], 1):
        curves.add(step, {"loss": loss, "lr": 0.5})
    assert curves.document() == {
        "width": 1,
        "first": [1, 2, 3, 4],
        "last": [1, 2, 3, 4],
        "values": {"loss": {"mean": [5.0, None, None, 3.0]}, "lr": {"mean": [0.5] * 4}},
    }


def test_many_steps_keep_their_mean_and_extremes() -> None:
    curves, count = Curves(most=100), 12_345
    losses = [1000.0 if step == 7777 else -1000.0 if step == 3 else step % 10 for step in range(1, count + 1)]
    for step, loss in enumerate(losses, 1):
        curves.add(step, {"loss": loss})
    found = curves.document()
    values = found["values"]["loss"]
    assert 50 < len(found["first"]) <= 100
    assert (found["first"][0], found["last"][-1]) == (1, count)
    assert found["first"][1:] == [last + 1 for last in found["last"][:-1]], "no step is left out"
    assert (min(values["low"]), max(values["high"])) == (-1000.0, 1000.0)
    for place, (first, last) in enumerate(zip(found["first"], found["last"], strict=True)):
        held = losses[first - 1 : last]
        assert values["mean"][place] == pytest.approx(sum(held) / len(held), rel=1e-5, abs=1e-5)
        assert (values["low"][place], values["high"][place]) == (min(held), max(held))
    assert curves.total("loss") == pytest.approx(sum(losses))
    assert curves.count("loss") == count


@pytest.mark.slow
def test_a_million_steps_fill_a_few_hundred_kilobytes() -> None:
    curves = Curves()
    for step in range(1, 1_000_001):
        curves.add(step, {"loss": 1 / step, "grad_norm": 1 + step % 7 / 3})
    assert curves.count("loss") == 1_000_000
    assert len(json.dumps(curves.document())) < 300_000


def test_steps_that_are_made_again_replace_the_earlier_ones() -> None:
    curves = Curves()
    for step, loss in [(1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0)]:
        curves.add(step, {"loss": loss})
    assert curves.document()["values"]["loss"]["mean"] == [1.0, 20.0]
    assert (curves.last_step, curves.total("loss")) == (2, 21.0)


def test_steps_far_apart_are_thinned_too() -> None:
    curves = Curves(most=8)
    for step in range(1, 10**9, 10**7):
        curves.add(step, {"loss": 1.0})
    assert len(curves) <= 8
    assert curves.count("loss") == 100


def test_a_sparkline_has_at_most_forty_cells() -> None:
    assert sparkline([]) == ""
    assert sparkline([3.0]) == "▁"
    assert sparkline([0.0, 7.0, 3.0]) == "▁█▄"
    line = sparkline([float(value) for value in range(1000)])
    assert len(line) == 40
    assert (line[0], line[-1], list(line)) == ("▁", "█", sorted(line))


def test_points_begin_at_the_first_step() -> None:
    curves = Curves(most=4)
    for step in range(1, 9):
        curves.add(step, {"loss": float(step)})
    found = curves.document()
    assert (found["width"], found["first"], found["last"]) == (2, [1, 3, 5, 7], [2, 4, 6, 8])
    assert found["values"]["loss"]["mean"] == [1.5, 3.5, 5.5, 7.5]

"""The search finds what an evaluation of every layout finds."""

import numpy as np
import pytest

from tests.support.small_searches import base, every_layout, rules_of, space_of
from tests.support.toy_costs import ToyCosts
from threefold.plan.search.choice import LayoutChoice
from threefold.plan.search.objectives import OBJECTIVES
from threefold.plan.search.search import BEST, Found, front, search

ENOUGH, SCARCE = 10**6, 1500


def searched(name: str, gpus: int, costs: ToyCosts, objective: str = "throughput", **fixed: object) -> Found:
    config = base(name)
    settings = {key.replace("__", "."): value for key, value in fixed.items()}
    return search(
        space_of(config, settings), rules_of(config), costs, OBJECTIVES[objective].counts(gpus), OBJECTIVES[objective]
    )


def exhaustive(name: str, gpus: int, costs: ToyCosts, objective: str) -> list[LayoutChoice]:
    row = OBJECTIVES[objective]
    every = (layout for count in row.counts(gpus) for layout in every_layout(space_of(base(name)), count))
    fitting = [choice for choice, sound in every if sound and costs.bytes_of(choice) <= costs.memory]
    return sorted(fitting, key=lambda each: (costs.seconds(each) * row.weight(each.gpus), costs.bytes_of(each), each))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("usable", [ENOUGH, SCARCE])
@pytest.mark.parametrize("loose", [0.0, 0.3])
def test_the_best_ten_are_those_of_an_exhaustive_evaluation(objective: str, usable: int, loose: float) -> None:
    costs = ToyCosts(base("gpt"), usable, loose)
    found = searched("gpt", 6, costs, objective)
    best = exhaustive("gpt", 6, costs, objective)
    assert [each.choice for each in found.ranked] == best[:BEST]
    assert found.fitting == len(best)
    assert found.evaluated == costs.evaluated < len(best)


def test_every_layout_is_counted_once() -> None:
    costs = ToyCosts(base("experts"), SCARCE)
    found = searched("experts", 8, costs)
    layouts = list(every_layout(space_of(base("experts")), 8))
    assert found.considered == len(layouts)
    assert found.sound == sum(sound for _, sound in layouts)
    assert sum(refusal.count for refusal in found.refusals) == found.considered - found.sound
    assert found.misfit is not None
    assert found.misfit.count == found.sound - found.fitting
    assert found.misfit.peak == min(
        costs.bytes_of(choice) for choice, sound in layouts if sound and costs.bytes_of(choice) > SCARCE
    )
    for refusal in found.refusals:
        assert refusal.sentence.startswith(refusal.key)


def test_fixed_settings_hold_in_every_layout() -> None:
    found = searched("gpt", 8, ToyCosts(base("gpt"), ENOUGH), parallel__tp=2, train__recompute="full", parallel__zero=0)
    assert {(each.choice.tp, each.choice.recompute, each.choice.zero) for each in found.ranked} == {(2, "full", 0)}


def test_throughput_uses_all_gpus_and_cost_may_use_fewer() -> None:
    costs = ToyCosts(base("gpt"), ENOUGH)
    assert {each.choice.gpus for each in searched("gpt", 8, costs).ranked} == {8}
    assert searched("gpt", 8, costs, "cost").ranked[0].choice.gpus == 1  # the toy's communication only costs


def test_the_points_of_the_picture_have_all_that_nothing_beats() -> None:
    found = searched("gpt", 8, ToyCosts(base("gpt"), ENOUGH, loose=0))
    assert found.points.seconds.min() == pytest.approx(found.ranked[0].seconds)
    seconds, peak = np.array([3.0, 1.0, 2.0, 2.0, 5.0]), np.array([1.0, 9.0, 4.0, 5.0, 1.0])
    assert list(front(seconds, peak)) == [0, 2, 1]

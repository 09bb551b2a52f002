"""The theory of pipeline schedules: known idle shares, and orders that can never end."""

import pytest

from threefold.config.schedule_actions import Action
from threefold.plan.simulate import simulate

COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def one_f_one_b(pp: int, count: int) -> list[list[Action]]:
    orders = []
    for stage in range(pp):
        ahead = min(count, pp - stage)
        order = [Action(stage, "F", number) for number in range(ahead)]
        for number in range(count):
            order.append(Action(stage, "B", number))
            if ahead + number < count:
                order.append(Action(stage, "F", ahead + number))
        orders.append(order)
    return orders


@pytest.mark.parametrize(("pp", "count"), [(1, 3), (2, 2), (2, 8), (4, 4), (4, 16)])
def test_one_forward_one_backward_idles_as_published(pp: int, count: int) -> None:
    """Narayanan et al. (arXiv 2104.04473, section 2.2): the bubble is (pp − 1) passes of a micro-batch."""
    timeline = simulate(one_f_one_b(pp, count), lambda action: COSTS[action.kind])
    assert timeline.length == 3 * (count + pp - 1)
    assert timeline.idle == pytest.approx((pp - 1) / (count + pp - 1))


def test_weight_gradients_fill_the_idle_time() -> None:
    whole = [[Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]
    parts = [
        [Action(0, "F", 0), Action(0, "I", 0), Action(0, "W", 0)],
        [Action(1, "F", 0), Action(1, "I", 0), Action(1, "W", 0)],
    ]
    assert simulate(whole, lambda action: COSTS[action.kind]).length == 6
    assert simulate(parts, lambda action: COSTS[action.kind]).length == 5


def test_stages_of_a_rank_are_worked_off_in_its_order() -> None:
    orders = [[Action(0, "F", 0), Action(1, "F", 0), Action(1, "B", 0), Action(0, "B", 0)]]
    timeline = simulate(orders, lambda action: COSTS[action.kind])
    assert (timeline.length, timeline.idle) == (6, 0)


@pytest.mark.parametrize(
    "orders",
    [
        [[Action(1, "F", 0)], []],
        [[Action(0, "B", 0), Action(0, "F", 0)]],
        [[Action(0, "F", 0), Action(0, "W", 0)]],
    ],
)
def test_an_order_that_never_ends_is_refused(orders: list[list[Action]]) -> None:
    with pytest.raises(ValueError, match="never gets to"):
        simulate(orders, lambda action: 1.0)

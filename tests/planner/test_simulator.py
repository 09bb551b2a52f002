"""The simulator: known and published idle shares, transfers, unequal stages, and orders that can never end."""

import random
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.planner.schedules import LIMITS, predicted_bubble, published_rows
from threefold.config.schedules import Action
from threefold.planner.schedule import Program, StageTimes, Timeline, find_planned, orders_of, share_of_ranks, simulate

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


def test_a_transfer_delays_the_next_stage_and_occupies_none() -> None:
    """Two micro-batches: while the first one travels, the first stage computes the second."""
    orders = [
        [Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0), Action(0, "B", 1)],
        [Action(1, "F", 0), Action(1, "B", 0), Action(1, "F", 1), Action(1, "B", 1)],
    ]
    timeline = simulate(orders, StageTimes((2.0, 2.0), (2.0, 2.0), (1.0, 1.0)), 0.5)
    assert [[(start, end) for _, start, end in rank] for rank in timeline.spans] == [
        [(0, 2), (2, 4), (8, 11), (13, 16)],
        [(2.5, 4.5), (4.5, 7.5), (7.5, 9.5), (9.5, 12.5)],
    ]
    assert (timeline.length, timeline.longest, timeline.busy) == (16, 16, (10, 10))
    assert timeline.bubble == timeline.idle == pytest.approx(6 / 16)


def test_stages_of_one_rank_send_nothing() -> None:
    orders = [[Action(0, "F", 0), Action(1, "F", 0), Action(1, "B", 0), Action(0, "B", 0)]]
    assert simulate(orders, StageTimes((1.0,) * 2, (1.0,) * 2, (1.0,) * 2), 100.0).length == 6


def test_the_longest_rank_counts_where_ranks_end_in_turn() -> None:
    """Where steps of ZB-H2 follow one another without a barrier, no rank waits between two of its actions."""
    timeline = simulate(orders_of("zb-h2", 4, 1, 12), StageTimes((1.0,) * 4, (1.0,) * 4, (1.0,) * 4))
    assert (timeline.longest, timeline.length) == (36, 39)
    assert timeline.bubble == 0
    assert timeline.idle == pytest.approx(3 / 39)


def test_an_unequal_stage_holds_the_others_up() -> None:
    """The slowest stage works without a pause; the others wait for it, which counts as bubble."""
    times = StageTimes((1.0, 2.0, 1.0), (1.0, 2.0, 1.0), (1.0, 2.0, 1.0))
    timeline = simulate(orders_of("1f1b", 3, 1, 20), times)
    waits = [after[1] - before[2] for before, after in pairwise(timeline.spans[1])]
    assert (sum(waits), waits[1]) == (1, 1)  # for its first backward pass alone
    assert timeline.length == 1 + 20 * 6 + 1 + 2
    assert timeline.bubble == pytest.approx(1 - (20 * 6 + 2 * 20 * 3) / (3 * timeline.longest))


def relaxed(orders: list[list[Action]], times: StageTimes, transfer: list[float]) -> dict[Action, float]:
    """The starts of all actions by another way: the constraints are applied until no start moves."""
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    cost = {"F": times.forward, "I": times.backward_input, "W": times.backward_weight}

    def length(action: Action) -> float:
        return sum(cost[kind][action.stage] for kind in {"B": "IW"}.get(action.kind, action.kind))

    starts = dict.fromkeys((action for order in orders for action in order), 0.0)

    def limits(action: Action, before: Action | None) -> list[float]:
        found = [0.0] if before is None else [starts[before] + length(before)]
        step = {"F": -1, "W": 0}.get(action.kind, 1)
        source = action.stage + step
        if step and source in rank_of:
            kinds = "F" if step < 0 else "BI"
            needed = next(each for kind in kinds if (each := Action(source, kind, action.micro_batch)) in starts)
            delay = 0.0 if rank_of[source] == rank_of[action.stage] else transfer[min(source, action.stage)]
            found.append(starts[needed] + length(needed) + delay)
        return found

    moved = True
    while moved:
        moved = False
        for order in orders:
            for before, action in zip([None, *order], order, strict=False):
                start = max(limits(action, before))
                moved |= start > starts[action]
                starts[action] = start
    return starts


@pytest.mark.parametrize(
    "name", ["1f1b", "gpipe", "interleaved", "zero-bubble", "looped-bfs", "zbv", "dualpipev", "zb-h2"]
)
def test_with_any_times_it_is_the_earliest_that_nothing_forbids(name: str) -> None:
    numbers = random.Random(name)
    pp, count = 3, 6
    chunks = find_planned(name).default_stages_per_rank
    stages = pp * chunks
    times = StageTimes(*(tuple(numbers.uniform(0.5, 3) for _ in range(stages)) for _ in range(3)))
    transfer = [numbers.uniform(0, 2) for _ in range(stages - 1)]
    orders = [list(order) for order in orders_of(name, pp, chunks, count)]
    timeline: Timeline = simulate(orders, times, transfer)
    found = {action: start for rank in timeline.spans for action, start, _ in rank}
    assert found == pytest.approx(relaxed(orders, times, transfer), rel=1e-12)
    assert [[action for action, _, _ in rank] for rank in timeline.spans] == orders


def test_a_program_is_simulated_with_several_times() -> None:
    program = Program(orders_of("1f1b", 2, 1, 4))
    assert [simulate(program, StageTimes((time,) * 2, (time,) * 2, (0.0,) * 2)).length for time in (1.0, 3.0)] == [
        10,
        30,
    ]  # (m + pp − 1)(F + B)


def test_times_of_a_rank_are_shared_by_its_stages() -> None:
    times = share_of_ranks((0, 1, 1, 0), [2.0, 6.0], [4.0, 4.0], [0.0, 1.0])
    assert times == StageTimes((1.0, 3.0, 3.0, 1.0), (2.0,) * 4, (0.0, 0.5, 0.5, 0.0))


def test_a_large_pipeline() -> None:
    """64 stages and 1,000 micro-batches: 1F1B's (m + pp − 1)(F + B) still holds."""
    timeline = simulate(orders_of("1f1b", 64, 1, 1000), StageTimes((1.0,) * 64, (1.0,) * 64, (1.0,) * 64))
    assert timeline.length == 3 * (1000 + 63)


ROWS = published_rows()
LARGEST_ERROR = {"1f1b": 0.0001, "zb-h1": 0.0001, "zb-h2": 0.0001, "interleaved": 0.0036}


@pytest.mark.parametrize("name", LARGEST_ERROR)
def test_bubbles(name: str) -> None:
    assert len(ROWS) == 6
    assert LARGEST_ERROR[name] <= LIMITS[name]
    for row in ROWS:
        assert predicted_bubble(row, name) == pytest.approx(row["bubble"][name], abs=LARGEST_ERROR[name])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['micro_batches']}")
def test_the_chunks_of_the_interleaved_runs_are_those_that_come_closest(row: dict[str, Any]) -> None:
    """The source does not say how many: with 24 and 32 layers on 8 stages, one layer a chunk is 3 and 4 chunks."""
    errors = {
        chunks: abs(predicted_bubble(row, "interleaved", chunks) - row["bubble"]["interleaved"])
        for chunks in (2, 3, 4, 5)
    }
    assert min(errors, key=errors.__getitem__) == row["chunks"]

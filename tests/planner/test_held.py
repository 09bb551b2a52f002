"""How many micro-batches ranks hold: as the schedules' rows say, and what that is in bytes."""

import copy
import pickle

import pytest

from threefold.config.schedules import SCHEDULES
from threefold.planner.schedule import (
    ONLY_PLANNED,
    HeldPasses,
    find_planned,
    held_by_rank,
    orders_of,
    peak_micro_batches,
)


@pytest.mark.parametrize("name", [*SCHEDULES, *ONLY_PLANNED])
@pytest.mark.parametrize("pp", [2, 4])
def test_ranks_hold_at_most_what_the_row_of_the_schedule_says(name: str, pp: int) -> None:
    row, count = find_planned(name), 6 * pp
    chunks = row.default_stages_per_rank
    allowed = [row.in_flight(pp, rank, chunks) for rank in range(pp)]
    held = peak_micro_batches(orders_of(row, pp, chunks, count))
    assert all(found <= (count if most is None else most) for found, most in zip(held, allowed, strict=True))


def test_known_peaks() -> None:
    assert peak_micro_batches(orders_of("1f1b", 4, 1, 16)) == [4, 3, 2, 1]
    assert peak_micro_batches(orders_of("1f1b", 4, 1, 2)) == [2, 2, 2, 1]
    assert peak_micro_batches(orders_of("gpipe", 4, 1, 16)) == [16] * 4
    assert peak_micro_batches(orders_of("zb-h1", 4, 1, 16)) == [4] * 4
    assert peak_micro_batches(orders_of("zb-h2", 4, 1, 16)) == [7] * 4
    assert peak_micro_batches(orders_of("interleaved", 4, 2, 16)) == [5.5, 4.5, 3.5, 2.5]


def test_what_waits_for_weight_gradients_is_told_apart() -> None:
    held = [held_by_rank(order) for order in orders_of("zb-h1", 4, 1, 16)]
    assert held == [(4, 4, 1), (4, 3, 2), (4, 2, 3), (4, 1, 4)]
    assert held[0] == HeldPasses(until_weights=4, until_backward=4, deferred=1)
    assert held_by_rank(orders_of("1f1b", 4, 1, 16)[1]) == (3, 3, 0)


@pytest.mark.parametrize("name", ONLY_PLANNED)
def test_a_schedule_that_is_only_planned_can_be_copied_and_takes_any_number(name: str) -> None:
    row = ONLY_PLANNED[name]
    assert copy.deepcopy(row) is pickle.loads(pickle.dumps(row)) is row
    assert row.accepts(4, 1)
    assert row.micro_batch_rule(4, 1) == "takes any number of them"
    assert row.sends_apart, "runs use it as a file of actions"

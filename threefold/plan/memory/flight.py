"""Which passes a pipeline rank holds at the moments of a step that can be its peak, from the actions that run."""

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from threefold.config.schedule_actions import Action
from threefold.config.schedules import Schedule
from threefold.plan.schedule.orders import orders_of

_ROUNDS: Final = 4
"""Rounds of pp micro-batches after which no rank holds more than before, where a schedule holds not all of them."""


class Flights(NamedTuple):
    """What a rank holds when each of its actions begins.

    Attributes:
        held: for each action and stage of the rank, the passes whose activations wait for their backward pass, the
            action's own among them, [actions, stages].
        deferred: likewise, those that wait for their weight gradients, the action's own not among them.
        alike: kind of an action and which of the rank's stages it is of → its actions.
    """

    held: NDArray[np.int64]
    deferred: NDArray[np.int64]
    alike: dict[tuple[str, int], list[int]]


def flights_of(schedule: Schedule, pp: int, chunks: int, micro_batches: int) -> tuple[Flights, ...]:
    """For each pipeline rank what it holds during a step.

    Args:
        schedule: of the config.
        pp: pipeline ranks.
        chunks: stages of each rank.
        micro_batches: of a step.

    Raises:
        UserError: the schedule is not for such numbers.
    """
    if pp == 1:
        return (Flights(np.ones((2, 1), dtype=int), np.zeros((2, 1), dtype=int), {("F", 0): [0], ("B", 0): [1]}),)
    rounds = micro_batches // pp
    if rounds > _ROUNDS and schedule.micro_batches is None and schedule.in_flight(pp, 0, chunks) is not None:
        micro_batches = _ROUNDS * (micro_batches // rounds)  # with rounds of the same length
    return _flights_of(schedule, pp, chunks, micro_batches)


@lru_cache(maxsize=4096)
def _flights_of(schedule: Schedule, pp: int, chunks: int, micro_batches: int) -> tuple[Flights, ...]:
    return tuple(_of_rank(order) for order in orders_of(schedule, pp, chunks, micro_batches))


def _of_rank(order: tuple[Action, ...]) -> Flights:
    places = {stage: place for place, stage in enumerate(sorted({action.stage for action in order}))}
    alike: dict[tuple[str, int], list[int]] = {}
    held, deferred = (np.zeros((len(order) + 1, len(places)), dtype=int) for _ in range(2))
    for number, (stage, kind, _) in enumerate(order):
        place = places[stage]
        alike.setdefault((kind, place), []).append(number)
        if kind == "F":
            held[number, place] += 1
        elif kind == "W":
            deferred[number, place] -= 1
        else:
            held[number + 1, place] -= 1
            deferred[number + 1, place] += kind == "I"
    return Flights(held.cumsum(axis=0)[:-1], deferred.cumsum(axis=0)[:-1], alike)

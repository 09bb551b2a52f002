"""Which passes a pipeline rank holds at the moments of a step that can be its peak, from the actions that run."""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from threefold.config.schedule_actions import Action
from threefold.config.schedules import SENDS_UNDER_WAY, Schedule
from threefold.plan.schedule.orders import orders_of

_ROUNDS: Final = 4
"""Rounds of pp micro-batches after which no rank holds more than before, where a schedule holds not all of them."""


class Flights(NamedTuple):
    """What a rank holds when each of its actions begins.

    Attributes:
        held: for each action and stage of the rank, the passes whose activations wait for their backward pass, the
            action's own among them, [actions, stages].
        deferred: likewise, those that wait for their weight gradients, the action's own not among them.
        sent: gradients that the rank has sent to stages before, whose memory is not free yet, [actions].
        alike: kind of an action and which of the rank's stages it is of → its actions.
    """

    held: NDArray[np.int64]
    deferred: NDArray[np.int64]
    sent: NDArray[np.int64]
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
        return (
            Flights(
                np.ones((2, 1), dtype=int),
                np.zeros((2, 1), dtype=int),
                np.zeros(2, dtype=int),
                {("F", 0): [0], ("B", 0): [1]},
            ),
        )
    rounds = micro_batches // pp
    if rounds > _ROUNDS and schedule.micro_batches is None and schedule.in_flight(pp, 0, chunks) is not None:
        micro_batches = _ROUNDS * (micro_batches // rounds)  # with rounds of the same length
    return _flights_of(schedule, pp, chunks, micro_batches)


@lru_cache(maxsize=4096)
def _flights_of(schedule: Schedule, pp: int, chunks: int, micro_batches: int) -> tuple[Flights, ...]:
    orders, ranks = orders_of(schedule, pp, chunks, micro_batches), schedule.stage_ranks(pp, chunks)
    under_way = SENDS_UNDER_WAY if schedule.sends_apart else 0
    return tuple(_of_rank(order, ranks, under_way) for order in orders)


def _of_rank(order: tuple[Action, ...], ranks: Sequence[int], under_way: int) -> Flights:
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
    sent = _gradients_under_way(order, ranks, under_way)
    return Flights(held.cumsum(axis=0)[:-1], deferred.cumsum(axis=0)[:-1], sent, alike)


def _gradients_under_way(order: Sequence[Action], ranks: Sequence[int], under_way: int) -> NDArray[np.int64]:
    """Of the last sends before each action, `under_way` of them, those of gradients; where each is waited for at once,
    the last one of a gradient, which the stage still refers to."""
    if not under_way:
        last = any(action.stage for action in order)
        return np.full(len(order), int(last), dtype=int)
    sends: deque[bool] = deque(maxlen=under_way)
    sent = np.zeros(len(order), dtype=int)
    for number, (stage, kind, _) in enumerate(order):
        sent[number] = sum(sends)
        to = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and 0 <= to < len(ranks) and ranks[to] != ranks[stage]:
            sends.append(kind != "F")
    return sent

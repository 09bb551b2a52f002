"""Which passes a pipeline rank holds at the moments of a step that can be its peak, from the actions that run."""

from functools import lru_cache
from typing import Final, NamedTuple

from threefold.config.schedule_actions import Action
from threefold.config.schedules import Schedule
from threefold.plan.schedule.orders import orders_of

_ROUNDS: Final = 4
"""Rounds of pp micro-batches after which no rank holds more than before, where a schedule holds not all of them."""


class Flight(NamedTuple):
    """A moment: an action begins.

    Attributes:
        kind: of the action, as in `Action`.
        stage: which of the rank's stages it is of.
        held: for each stage of the rank, the passes whose activations wait for their backward pass, the action's own
            among them.
        deferred: for each stage, those that wait for their weight gradients, the action's own not among them.
    """

    kind: str
    stage: int
    held: tuple[int, ...]
    deferred: tuple[int, ...]

    def is_covered_by(self, other: "Flight") -> bool:
        """Whether the other moment has as much of everything."""
        return (
            (self.kind, self.stage) == (other.kind, other.stage)
            and all(mine <= its for mine, its in zip(self.held, other.held, strict=True))
            and all(mine <= its for mine, its in zip(self.deferred, other.deferred, strict=True))
        )


def flights_of(schedule: Schedule, pp: int, chunks: int, micro_batches: int) -> tuple[tuple[Flight, ...], ...]:
    """For each pipeline rank the moments of a step of which no other has as much of everything.

    Args:
        schedule: of the config.
        pp: pipeline ranks.
        chunks: stages of each rank.
        micro_batches: of a step.

    Raises:
        UserError: the schedule is not for such numbers.
    """
    if pp == 1:
        return ((Flight("F", 0, (1,), (0,)), Flight("B", 0, (1,), (0,))),)
    rounds = micro_batches // pp
    if rounds > _ROUNDS and schedule.micro_batches is None and schedule.in_flight(pp, 0, chunks) is not None:
        micro_batches = _ROUNDS * (micro_batches // rounds)  # with rounds of the same length
    return _flights_of(schedule, pp, chunks, micro_batches)


@lru_cache(maxsize=4096)
def _flights_of(schedule: Schedule, pp: int, chunks: int, micro_batches: int) -> tuple[tuple[Flight, ...], ...]:
    return tuple(_of_rank(order) for order in orders_of(schedule, pp, chunks, micro_batches))


def _of_rank(order: tuple[Action, ...]) -> tuple[Flight, ...]:
    places = {stage: place for place, stage in enumerate(sorted({action.stage for action in order}))}
    held, deferred = [0] * len(places), [0] * len(places)
    seen = dict[Flight, None]()
    for stage, kind, _ in order:
        place = places[stage]
        if kind == "F":
            held[place] += 1
        elif kind == "W":
            deferred[place] -= 1
        seen[Flight(kind, place, tuple(held), tuple(deferred))] = None
        if kind in "BI":
            held[place] -= 1
            deferred[place] += kind == "I"
    largest: list[Flight] = []
    for flight in seen:
        if not any(flight.is_covered_by(other) for other in largest):
            largest = [other for other in largest if not other.is_covered_by(flight)] + [flight]
    return tuple(largest)

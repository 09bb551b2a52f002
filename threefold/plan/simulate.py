"""Simulator of pipeline schedules: step time and bubble from the order of actions and the cost of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from threefold.config.schedule_actions import Action, in_order, needs_of, result_of, stage_count


@dataclass(frozen=True)
class Timeline:
    """When each action of a step runs if it starts as early as it may.

    Attributes:
        spans: per rank, its actions with start and end, in the unit of the costs; the step begins at 0.
    """

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]

    @property
    def length(self) -> float:
        """From the start of the step to the end of its last action."""
        return max((end for rank in self.spans for _, _, end in rank), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(sum(end - start for _, start, end in rank) for rank in self.spans)

    @property
    def idle(self) -> float:
        """The bubble: share of the ranks' time in which they wait, from 0 to 1."""
        return 1 - sum(self.busy) / (self.length * len(self.spans)) if self.length else 0.0


def simulate(orders: Sequence[Sequence[Action]], cost: Callable[[Action], float]) -> Timeline:
    """Run the actions of each rank in their order, each as soon as the results that it needs are there.

    A forward pass needs that of the stage before, a backward pass the stage's own forward pass and the backward pass of
    the stage after; the gradients of weights need the stage's own backward pass. Sending costs nothing.

    Args:
        orders: each rank's actions.
        cost: how long one takes.

    Raises:
        ValueError: ranks wait for one another forever, or for an action that no rank has.
    """
    stages = stage_count(orders)
    ended: dict[Action, float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in orders]
    for rank, action in in_order(orders):
        idle_from = spans[rank][-1][2] if spans[rank] else 0.0
        start = max([idle_from, *(ended[needed] for needed in needs_of(action, stages))])
        end = ended[result_of(action)] = start + cost(action)
        spans[rank].append((action, start, end))
    return Timeline(tuple(tuple(done) for done in spans))

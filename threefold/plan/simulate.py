"""What a pipeline schedule takes by its own theory: its order of work, what each piece costs, and nothing else."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from threefold.parallel.pipeline.pipe import Action


@dataclass(frozen=True)
class Timeline:
    """When each piece of a step's work runs where pieces start as early as they may.

    Attributes:
        spans: per rank, its actions with start and end, in the unit of the costs; the step begins at 0.
    """

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]

    @property
    def length(self) -> float:
        """From the start of the step to the end of its last piece."""
        return max((end for rank in self.spans for _, _, end in rank), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """How long each rank works."""
        return tuple(sum(end - start for _, start, end in rank) for rank in self.spans)

    @property
    def idle(self) -> float:
        """Share of the ranks' time in which they wait, from 0 to 1."""
        return 1 - sum(self.busy) / (self.length * len(self.spans)) if self.length else 0.0


def simulate(orders: Sequence[Sequence[Action]], cost: Callable[[Action], float]) -> Timeline:
    """Run the schedule in which each rank works off its actions in order, each as soon as what it needs is there.

    A forward pass needs that of the stage before, a backward pass the stage's own forward pass and the backward pass of
    the stage after; the gradients of weights need the stage's own backward pass. Sending costs nothing.

    Args:
        orders: each rank's actions.
        cost: how long one takes.

    Raises:
        ValueError: ranks wait for one another for ever, or for something that nobody does.
    """
    stages = 1 + max((action.stage for order in orders for action in order), default=0)
    ended: dict[tuple[int, str, int], float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in orders]
    while any(len(done) < len(order) for done, order in zip(spans, orders, strict=True)):
        moved = False
        for done, order in zip(spans, orders, strict=True):
            while len(done) < len(order) and (ready := _ready(order[len(done)], stages, ended)) is not None:
                action = order[len(done)]
                start = max(ready, done[-1][2] if done else 0.0)
                done.append((action, start, start + cost(action)))
                ended[_result(action)] = done[-1][2]
                moved = True
        if not moved:
            waiting = [order[len(done)] for done, order in zip(spans, orders, strict=True) if len(done) < len(order)]
            raise ValueError(f"the schedule never gets to {waiting[0]}")
    return Timeline(tuple(tuple(done) for done in spans))


def _result(action: Action) -> tuple[int, str, int]:
    """What an action brings about: both kinds of backward pass give the gradient that the stage before waits for."""
    return action.stage, "I" if action.kind == "B" else action.kind, action.micro_batch


def _ready(action: Action, stages: int, ended: Mapping[tuple[int, str, int], float]) -> float | None:
    """When all that an action needs is there, or None while something is missing."""
    stage, kind, number = action
    if kind == "F":
        needed = [(stage - 1, "F", number)] if stage else []
    elif kind == "W":
        needed = [(stage, "I", number)]
    else:
        needed = [(stage, "F", number)] + ([(stage + 1, "I", number)] if stage + 1 < stages else [])
    if any(each not in ended for each in needed):
        return None
    return max((ended[each] for each in needed), default=0.0)

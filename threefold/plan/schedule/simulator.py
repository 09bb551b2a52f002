"""Simulator of pipeline schedules: step time and bubble from the order of actions and the time of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from threefold.config.schedule_actions import Action, in_order, stage_count

_KINDS: Final = "FBIW"


@dataclass(frozen=True)
class StageTimes:
    """How long the passes of one micro-batch take on each stage, in any unit of time.

    Attributes:
        forward: forward pass, per stage of the pipeline.
        backward_input: the part of the backward pass that computes the gradient for the stage before.
        backward_weight: the part that computes the gradients of weights; a full backward pass takes both.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]

    def by_kind(self) -> tuple[tuple[float, ...], ...]:
        """Per stage the times of F, B, I and W."""
        parts = zip(self.forward, self.backward_input, self.backward_weight, strict=True)
        return tuple((forward, inputs + weights, inputs, weights) for forward, inputs, weights in parts)


def share_of_ranks(
    ranks: Sequence[int], forward: Sequence[float], backward_input: Sequence[float], backward_weight: Sequence[float]
) -> StageTimes:
    """The times of each stage where those of all layers of each rank are given, in equal parts for its stages.

    Args:
        ranks: the pipeline rank of each stage.
        forward, backward_input, backward_weight: per rank.
    """
    held = [ranks.count(rank) for rank in range(1 + max(ranks))]
    parts = [tuple(times[rank] / held[rank] for rank in ranks) for times in (forward, backward_input, backward_weight)]
    return StageTimes(*parts)


class Program:
    """The actions of all ranks, resolved: what a simulation with any times goes through once.

    Args:
        orders: each rank's actions.

    Attributes:
        orders: as given.
        actions: all of them, each after those that it waits for.
        ranks: the rank of each action.
        codes: of each action, 4 · its stage + the place of its kind in `FBIW`.
        sources: of each action, the number of the action of another rank whose result it waits for; -1 for none.
        stages: of the pipeline.

    Raises:
        ValueError: ranks wait for one another forever, or for an action that no rank has; or two ranks have one stage.
    """

    def __init__(self, orders: Sequence[Sequence[Action]]) -> None:
        self.orders, self.stages = orders, stage_count(orders)
        rank_of: dict[int, int] = {}
        for rank, order in enumerate(orders):
            for stage in {action[0] for action in order}:
                if rank_of.setdefault(stage, rank) != rank:
                    raise ValueError(f"ranks {rank_of[stage]} and {rank} both have actions of stage {stage}")
        place = {kind: number for number, kind in enumerate(_KINDS)}
        self.actions: list[Action] = []
        self.ranks: list[int] = []
        self.codes: list[int] = []
        self.sources: list[int] = []
        for rank, action, source in in_order(orders):
            self.actions.append(action)
            self.ranks.append(rank)
            self.codes.append(4 * action[0] + place[action[1]])
            self.sources.append(source if source >= 0 and self.ranks[source] != rank else -1)


@dataclass(frozen=True)
class Timeline:
    """When each action of a step runs if it starts as early as it may; the step begins at 0.

    Attributes:
        program: its actions.
        starts, ends: of each action of the program, in the unit of the times.
    """

    program: Program
    starts: list[float]
    ends: list[float]

    @cached_property
    def spans(self) -> tuple[tuple[tuple[Action, float, float], ...], ...]:
        """Per rank its actions in order, with start and end."""
        of_rank: list[list[tuple[Action, float, float]]] = [[] for _ in self.program.orders]
        each = zip(self.program.ranks, self.program.actions, self.starts, self.ends, strict=True)
        for rank, action, start, end in each:
            of_rank[rank].append((action, start, end))
        return tuple(map(tuple, of_rank))

    @property
    def length(self) -> float:
        """From the start of the step to the end of its last action."""
        return max(self.ends, default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        found = [0.0] * len(self.program.orders)
        for rank, start, end in zip(self.program.ranks, self.starts, self.ends, strict=True):
            found[rank] += end - start
        return tuple(found)

    @property
    def idle(self) -> float:
        """Share of the ranks' time in which they wait, from 0 to 1, over the whole step."""
        return 1 - sum(self.busy) / (self.length * len(self.busy)) if self.length else 0.0

    @cached_property
    def longest(self) -> float:
        """The longest time of a rank from the start of its first action to the end of its last.

        Steps that follow one another without a barrier take so long each: a rank that ends early begins the next.
        """
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for rank, start, end in zip(self.program.ranks, self.starts, self.ends, strict=True):
            first.setdefault(rank, start)
            last[rank] = end
        return max((last[rank] - first[rank] for rank in first), default=0.0)

    @property
    def bubble(self) -> float:
        """Share of `longest` in which a rank waits, the mean over the ranks: the bubble rate of Qi et al. (arXiv
        2401.10241, section 5), (longest − m(F + B + W)) / longest with equal stages and m micro-batches."""
        return 1 - sum(self.busy) / (self.longest * len(self.busy)) if self.longest else 0.0


def simulate(
    orders: Sequence[Sequence[Action]] | Program,
    cost: StageTimes | Callable[[Action], float],
    transfer: float | Sequence[float] = 0.0,
) -> Timeline:
    """Run the actions of each rank in their order, each as soon as the results that it waits for are there.

    What is sent to another rank arrives a transfer time later; sending and receiving occupy neither of the two.

    Args:
        orders: each rank's actions, or their program where several simulations share it.
        cost: how long the passes take on each stage, or a function of the action.
        transfer: time from a stage to the next, and back; one for all, or one for each pair of neighbouring stages.

    Raises:
        ValueError: ranks wait for one another forever, or for an action that no rank has; or numbers of stages differ.
    """
    program = orders if isinstance(orders, Program) else Program(orders)
    delays = _delays(program.stages, transfer)
    if isinstance(cost, StageTimes):
        by_code = [time for times in cost.by_kind() for time in times]
        if len(by_code) != 4 * program.stages:
            raise ValueError(f"times are given for {len(cost.forward)} stages, and the schedule has {program.stages}")
        times = [by_code[code] for code in program.codes]
    else:
        times = [cost(action) for action in program.actions]
    free = [0.0] * len(program.orders)
    starts: list[float] = []
    ends: list[float] = []
    for rank, code, source, time in zip(program.ranks, program.codes, program.sources, times, strict=True):
        start = free[rank]
        if source >= 0:
            arrival = ends[source] + delays[code]
            if arrival > start:
                start = arrival
        starts.append(start)
        free[rank] = end = start + time
        ends.append(end)
    return Timeline(program, starts, ends)


def _delays(stages: int, transfer: float | Sequence[float]) -> list[float]:
    """For each code of an action, how long what it waits for is on its way."""
    between = [transfer] * (stages - 1) if isinstance(transfer, int | float) else list(transfer)
    if len(between) != stages - 1:
        raise ValueError(f"{len(between)} transfer times are given between {stages} stages")
    before, after = [0.0, *between], [*between, 0.0]
    return [delay for stage in range(stages) for delay in (before[stage], after[stage], after[stage], 0.0)]

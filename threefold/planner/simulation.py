"""Simulated pipeline schedules: the micro-batches a rank holds during a step, and the activation memory they need."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from threefold.config.schedules import Action, Schedule
from threefold.errors import UserError
from threefold.planner.schedule import StageTimes, Timeline, check_numbers, program_of, share_of_ranks, simulate


class HeldPasses(NamedTuple):
    """Peak number of passes that a rank holds at once, each pass being one micro-batch through one stage.

    Attributes:
        until_weights: passes without weight gradients yet, as if they kept all activations until then.
        until_backward: passes whose activations wait for their backward pass.
        deferred: passes that have had their backward pass and wait for their weight gradients.
    """

    until_weights: int
    until_backward: int
    deferred: int


def held_by_rank(order: Sequence[Action]) -> HeldPasses:
    """Return a rank's peaks, each at its own time.

    A pass counts from the start of its forward pass to the end of its last action.
    """
    waiting = deferred = most = most_waiting = most_deferred = 0
    for _, kind, _ in order:
        if kind == "F":
            waiting += 1
        elif kind == "B":
            waiting -= 1
        elif kind == "I":
            waiting, deferred = waiting - 1, deferred + 1
        else:
            deferred -= 1
        most = max(most, waiting + deferred)
        most_waiting, most_deferred = max(most_waiting, waiting), max(most_deferred, deferred)
    return HeldPasses(most, most_waiting, most_deferred)


def peak_micro_batches(orders: Sequence[Sequence[Action]]) -> list[float]:
    """Return each rank's peak of micro-batches held until their weight gradients are computed. A pass through one of a
    rank's v stages counts as 1/v micro-batch."""
    return [held_by_rank(order).until_weights / max(1, len({action[0] for action in order})) for order in orders]


MOST_ACTIONS: Final = 3_000_000
"""Largest number of actions to simulate: about a gigabyte of memory and ten seconds."""


@dataclass(frozen=True)
class Simulation:
    """Timeline of one step under a schedule, in the unit of the given times."""

    schedule: Schedule
    pp: int
    chunks: int
    micro_batches: int
    timeline: Timeline

    @cached_property
    def peaks(self) -> list[float]:
        """Each rank's peak of micro-batches held until their weight gradients are computed."""
        return peak_micro_batches(self.timeline.program.orders)

    @cached_property
    def held(self) -> list[HeldPasses]:
        """Each rank's peaks of passes held at once."""
        return [held_by_rank(order) for order in self.timeline.program.orders]

    def facts(self) -> dict[str, Any]:
        """Return the results as JSON values, with times in the unit of the input and lists per pipeline rank."""
        timeline = self.timeline
        of_rank = [max(1, len({action[0] for action in order})) for order in timeline.program.orders]
        starts = [order[0][1] if order else 0.0 for order in timeline.spans]
        ends = [order[-1][2] if order else 0.0 for order in timeline.spans]
        return {
            "schedule": self.schedule.name,
            "stages": self.pp,
            "chunks": self.chunks,
            "microbatches": self.micro_batches,
            "bubble": timeline.bubble,
            "step_time": timeline.length,
            "longest_stage_time": timeline.longest,
            "peak_microbatches": [int(peak) if peak == int(peak) else peak for peak in self.peaks],
            "peak_before_backward": [
                held.until_backward / stages for held, stages in zip(self.held, of_rank, strict=True)
            ],
            "peak_deferred": [held.deferred / stages for held, stages in zip(self.held, of_rank, strict=True)],
            "busy_time": list(timeline.busy),
            "start": starts,
            "end": ends,
        }


def simulated(
    schedule: Schedule,
    pp: int,
    chunks: int,
    micro_batches: int,
    passes: Sequence[Sequence[float]],
    transfer: Sequence[float],
) -> Simulation:
    """Simulate a step.

    Args:
        schedule: schedule to simulate, built in or from a file.
        pp, chunks, micro_batches: see `Simulation`.
        passes: times of the forward pass, the backward pass for inputs and that for weights; each has one time for all
            ranks, one per rank, or one per stage. A rank's time is split evenly over its stages.
        transfer: one time for all stages, or one from each stage to the next.

    Raises:
        UserError: the schedule does not support these numbers, the counts of times do not match, or all times are 0.
    """
    check_numbers(schedule, pp, chunks, micro_batches)
    ranks = schedule.stage_ranks(pp, chunks)
    actions = len(ranks) * micro_batches * (3 if schedule.defers_weight_gradients else 2)
    if actions > MOST_ACTIONS:
        fitting = max(1, micro_batches * MOST_ACTIONS // actions)
        raise UserError(
            f"The schedule {schedule.name} with {len(ranks):,} stages and {micro_batches:,} micro-batches has "
            f"{actions:,} actions, and at most {MOST_ACTIONS:,} are simulated; use {fitting:,} micro-batches or fewer."
        )
    times = _times(passes, ranks, pp)
    if not any(map(any, passes)):
        raise UserError("All passes take 0 ms, so that there is nothing to simulate; give --forward a time above 0.")
    if len(transfer) not in (1, len(ranks) - 1):
        between = f"{len(ranks) - 1} of them, one from each of {len(ranks)} stages to the next"
        raise UserError(f"--transfer has {len(transfer)} times and needs one for all or {between}; give one.")
    program = program_of(schedule, pp, chunks, micro_batches)
    return Simulation(
        schedule, pp, chunks, micro_batches, simulate(program, times, transfer[0] if len(transfer) == 1 else transfer)
    )


def _times(passes: Sequence[Sequence[float]], ranks: Sequence[int], pp: int) -> StageTimes:
    """Expand the given times to one per stage."""
    of_stages = []
    for given, option in zip(passes, ("--forward", "--backward-input", "--backward-weight"), strict=True):
        if len(given) in (1, pp):
            of_ranks = list(given) * pp if len(given) == 1 else list(given)
            of_stages.append(share_of_ranks(ranks, of_ranks, of_ranks, of_ranks).forward)
        elif len(given) == len(ranks):
            of_stages.append(tuple(given))
        else:
            counts = f"{pp}, one for each stage" if len(ranks) == pp else f"{pp} or {len(ranks)}, one per rank or stage"
            raise UserError(f"{option} has {len(given)} times and needs one for all or {counts}; give one.")
    return StageTimes(*of_stages)

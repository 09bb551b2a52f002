"""How many micro-batches a rank holds while it works off its actions: what activations need memory for."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from threefold.config.schedules import Action, Schedule
from threefold.errors import UserError
from threefold.planner.schedule import StageTimes, Timeline, check_numbers, program_of, share_of_ranks, simulate


class HeldPasses(NamedTuple):
    """The most that a rank holds at once, in passes of a micro-batch through one stage.

    Attributes:
        until_weights: passes whose weight gradients are not computed, as if they kept all activations until then.
        until_backward: passes whose activations wait for their backward pass.
        deferred: passes that have had their backward pass and wait for their weight gradients.
    """

    until_weights: int
    until_backward: int
    deferred: int


def held_by_rank(order: Sequence[Action]) -> HeldPasses:
    """What a rank holds at most, each of the three at a time of its own.

    A pass begins to hold when it begins, and ends when its action has ended. `peak_bytes` has the time of the largest
    sum.
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


def peak_bytes(order: Sequence[Action], activations: Sequence[float], deferred: Sequence[float]) -> float:
    """The most bytes of activations that a rank holds at once.

    Args:
        order: its actions.
        activations: bytes that a forward pass keeps for the backward pass, per stage of the pipeline.
        deferred: bytes that remain from the backward pass for the input (`I`) until that for the weights (`W`), per
            stage.
    """
    held = most = 0.0
    for stage, kind, _ in order:
        if kind == "F":
            held += activations[stage]
        elif kind == "B":
            held -= activations[stage]
        elif kind == "I":
            most = max(most, held + deferred[stage])  # what remains is there before what is not is freed
            held += deferred[stage] - activations[stage]
        else:
            held -= deferred[stage]
        most = max(most, held)
    return most


def peak_micro_batches(orders: Sequence[Sequence[Action]]) -> list[float]:
    """Per rank the most micro-batches that it holds at once until their weight gradients are computed, in micro-batches
    of all its layers: a pass through one of v stages is 1/v of one."""
    return [held_by_rank(order).until_weights / max(1, len({action[0] for action in order})) for order in orders]


MOST_ACTIONS: Final = 3_000_000
"""Of a schedule that is simulated: about a gigabyte of memory and ten seconds."""


@dataclass(frozen=True)
class Simulation:
    """A step under a schedule.

    Attributes:
        schedule: its row or file.
        pp: pipeline ranks.
        chunks: stages of each rank.
        micro_batches: of the step.
        timeline: when each action runs, in the unit of the times.
    """

    schedule: Schedule
    pp: int
    chunks: int
    micro_batches: int
    timeline: Timeline

    @cached_property
    def peaks(self) -> list[float]:
        """Per rank the most micro-batches held at once, until their weight gradients are computed."""
        return peak_micro_batches(self.timeline.program.orders)

    @cached_property
    def held(self) -> list[HeldPasses]:
        """Per rank the most passes held at once."""
        return [held_by_rank(order) for order in self.timeline.program.orders]

    def facts(self) -> dict[str, Any]:
        """All that is told, as JSON has it; times in the unit of those given, lists per pipeline rank."""
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
        schedule: row or file.
        pp, chunks, micro_batches: as of `Simulation`.
        passes: times of forward pass, backward pass for the input, and for the weights; each one for all ranks, one per
            rank, or one per stage. Those of a rank are for all its stages together, which take equal parts.
        transfer: one for all, or one from each stage to the next.

    Raises:
        UserError: the schedule is not for such numbers, numbers of times do not fit, or all times are 0.
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
    """The times of each stage."""
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

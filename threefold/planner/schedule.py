"""Pipeline schedules over time: the actions of each rank as data, their times, and the passes that a rank holds."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Final, NamedTuple

from threefold.config.schedules import (
    SCHEDULES,
    Action,
    Orders,
    StageSchedule,
    TorchSchedule,
    find_schedule,
)
from threefold.errors import UserError
from threefold.planner.custom_schedule import in_order, stage_count
from threefold.plugins import one_of

_KINDS: Final = "FBIW"
_ROUNDS: Final = 8  # of as many micro-batches as ranks; further ones take as long as the last of these


class StageTimes(NamedTuple):
    """Times of one micro-batch's passes on each stage, in any unit; a full backward pass takes both of its parts."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]


def share_of_ranks(ranks: Sequence[int], *passes: Sequence[float]) -> StageTimes:
    """Split each rank's times of its three passes evenly over its stages; `ranks` has the rank of each stage."""
    held = Counter(ranks)
    return StageTimes(*(tuple(times[rank] / held[rank] for rank in ranks) for times in passes))


class Program:
    """Actions of all ranks with their dependencies resolved, so that simulations with different times can share them.

    Each action comes after those that it waits for. Its code is 4 · stage + index of its kind in `FBIW`, and its source
    is the index of the other rank's action whose result it waits for, or -1. Raises a `ValueError` if ranks wait for
    one another forever or for an action that no rank has.
    """

    def __init__(self, orders: Sequence[Sequence[Action]]) -> None:
        self.orders, self.stages = orders, stage_count(orders)
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
    """Start and end of each action of a step that begins at 0, where every action runs as early as possible."""

    program: Program
    starts: list[float]
    ends: list[float]

    @cached_property
    def spans(self) -> tuple[tuple[tuple[Action, float, float], ...], ...]:
        """Actions of each rank in order, with start and end."""
        of_rank: list[list[tuple[Action, float, float]]] = [[] for _ in self.program.orders]
        program = self.program
        for rank, action, start, end in zip(program.ranks, program.actions, self.starts, self.ends, strict=True):
            of_rank[rank].append((action, start, end))
        return tuple(map(tuple, of_rank))

    @property
    def length(self) -> float:
        """Time from the start of the step to the end of its last action."""
        return max(self.ends, default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        found = [0.0] * len(self.program.orders)
        for rank, start, end in zip(self.program.ranks, self.starts, self.ends, strict=True):
            found[rank] += end - start
        return tuple(found)

    @property
    def idle(self) -> float:
        """Share of the ranks' time that they spend waiting, from 0 to 1, over the whole step."""
        return 1 - sum(self.busy) / (self.length * len(self.busy)) if self.length else 0.0

    @cached_property
    def longest(self) -> float:
        """Longest time of a rank from the start of its first action to the end of its last.

        Without a barrier between steps this is the time per step, since a rank that ends early begins the next one.
        """
        return max((order[-1][2] - order[0][1] for order in self.spans if order), default=0.0)

    @property
    def bubble(self) -> float:
        """Share of `longest` that a rank waits, averaged over ranks: the bubble rate of Qi et al. (arXiv 2401.10241,
        section 5), (longest − m(F + B + W)) / longest for equal stages and m micro-batches."""
        return 1 - sum(self.busy) / (self.longest * len(self.busy)) if self.longest else 0.0


def simulate(
    orders: Sequence[Sequence[Action]] | Program,
    cost: StageTimes | Callable[[Action], float],
    transfer: float | Sequence[float] = 0.0,
) -> Timeline:
    """Run each rank's actions in order, each as soon as its inputs have arrived.

    A result reaches another rank after the transfer time, one for all pairs of neighbouring stages or one for each;
    sending and receiving occupy neither rank.
    """
    program = orders if isinstance(orders, Program) else Program(orders)
    between = [transfer] * (program.stages - 1) if isinstance(transfer, int | float) else transfer
    # The transfer time of the awaited result, for each code of an action.
    delays = [
        delay
        for before, after in zip([0.0, *between], [*between, 0.0], strict=True)
        for delay in (before, after, after, 0.0)
    ]
    if isinstance(cost, StageTimes):
        by_code = [time for f, i, w in zip(*cost, strict=True) for time in (f, i + w, i, w)]  # in the order of `_KINDS`
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


@dataclass(frozen=True)
class Rounds:
    """Schedule of the 1F1B family, by how far its ranks run ahead and how long they defer weight gradients.

    A rank is `hop` forward passes ahead of the next rank before its first backward pass; None for all passes. Rank r
    defers its weight gradients by `wait` · r backward passes; None if backward passes compute them.
    """

    hop: int | None
    wait: int | None = None

    def order(self, pp: int, rank: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
        """Return the actions of a rank: of its stages, rank modulo pp; with several chunks, in equal rounds of
        micro-batches."""
        passes, in_round = chunks * micro_batches, micro_batches // max(1, micro_batches // pp)
        ahead = passes if self.hop is None else min(passes, (chunks - 1) * in_round + self.hop * (pp - 1 - rank))
        # Pass n of a kind belongs to chunk (n / in_round) modulo chunks and takes its next micro-batch.
        nth = []
        for number in range(passes):
            turn, place = divmod(number, in_round)
            nth.append((turn % chunks, turn // chunks * in_round + place))
        forwards = [Action(chunk * pp + rank, "F", number) for chunk, number in nth]
        kind = "B" if self.wait is None else "I"
        backwards = [Action((chunks - 1 - chunk) * pp + rank, kind, number) for chunk, number in nth]
        order = forwards[:ahead]
        if self.wait is None:
            for forward, backward in zip(forwards[ahead:], backwards, strict=False):
                order += forward, backward
            return (*order, *backwards[passes - ahead :])
        behind = self.wait * rank
        weights = [action._replace(kind="W") for action in backwards]
        for number, backward in enumerate(backwards):
            order += forwards[ahead + number : ahead + number + 1]
            order.append(backward)
            order += weights[number - behind : number - behind + 1] if number >= behind else ()
        return (*order, *weights[max(0, passes - behind) :])


def looped_bfs_order(pp: int, rank: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    """Return a rank's actions in breadth-first pipeline parallelism (Lamy-Poirier, arXiv 2211.05953): all micro-batches
    through one of its stages before the next, then back in reverse order."""
    forwards = [Action(chunk * pp + rank, "F", number) for chunk in range(chunks) for number in range(micro_batches)]
    return (*forwards, *(action._replace(kind="B") for action in reversed(forwards)))


def zbv_order(pp: int, rank: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    """Return a rank's actions in ZB-V of Qi et al. (arXiv 2401.10241, section 6), as torch runs it; `chunks` is 2.

    With fewer than 2 · pp − 1 micro-batches, the order for 2 · pp − 1 is built and the surplus left out.
    """
    count, after = max(2 * pp - 1, micro_batches), pp - rank
    first_forwards = 2 * pp - 1 - rank  # of the first stage, before both stages take turns
    turns = count - pp
    both = "fiwFIW" * (count - first_forwards) + "iwFIW" * (turns - (count - first_forwards))
    at_end = rank + after
    letters = "f" * (2 * after - 1) + "Ff" * rank + "FIW" * after + both + "iI" * rank + "iw" * after
    letters += "W" * rank + "w" * (at_end - after)
    return tuple(action for action in _spelled(letters, pp, rank) if action.micro_batch < micro_batches)


def dualpipev_order(pp: int, rank: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    """Return a rank's actions in DualPipeV (DeepSeek-AI, arXiv 2412.19437; Qi et al., 2024); `chunks` is 2.

    Like torch, it has two actions for a forward and a backward pass that a GPU overlaps, the forward pass first.
    """
    after, last = pp - rank - 1, rank + 1
    letters = "f" * (2 * after) + "fF" * last + "IqF" * after + "fBFb" * (micro_batches - 2 * pp + last) + "BFb" * after
    # The stages alternate: full backward passes in the first half, backward passes for inputs in the second.
    full = 2 * (last // 2) + 1 - rank % 2
    letters += "".join("BbIi"[2 * (place >= full) + place % 2] for place in range(2 * last))
    letters += ("qi" if full < 2 * last else "qb") * after + "q" * last
    return tuple(_spelled(letters, pp, rank))


def _spelled(letters: str, pp: int, rank: int) -> list[Action]:
    """Return the actions that the letters spell: lower case for the second stage, q for the oldest deferred W."""
    stages = {True: rank, False: 2 * pp - 1 - rank}
    done: Counter[str] = Counter()
    waiting: deque[Action] = deque()
    order = []
    for letter in letters:
        if letter == "q":
            if waiting:
                order.append(waiting.popleft())
            continue
        stage, kind = stages[letter.islower()], letter.upper()
        turn = "I" if kind == "B" else kind  # full and input-only backward passes share one count
        action = Action(stage, kind, done[f"{turn}{stage}"])
        done[f"{turn}{stage}"] += 1
        order.append(action)
        if kind == "I":
            waiting.append(action._replace(kind="W"))
    return order


_WRITTEN: Final[Mapping[str, Callable[[int, int, int, int], tuple[Action, ...]]]] = {
    "1f1b": Rounds(hop=1).order,
    "gpipe": Rounds(hop=None).order,
    "interleaved": Rounds(hop=2).order,
    "looped-bfs": looped_bfs_order,
    "zero-bubble": Rounds(hop=1, wait=1).order,
    "zb-h1": Rounds(hop=1, wait=1).order,
    "zb-h2": Rounds(hop=2, wait=2).order,
    "zbv": zbv_order,
    "dualpipev": dualpipev_order,
}
"""Schedules written here without torch, as functions of pipeline ranks, a rank, stages per rank and micro-batches that
return the rank's actions; torch's classes give those of any other."""


class _PlannedSchedule(TorchSchedule):
    """Schedule that is not in the config's table: no class of torch has it, and runs use it as a CSV file."""

    sends_apart = True

    def __reduce__(self) -> tuple[Callable[[str], StageSchedule], tuple[str]]:
        return find_planned, (self.name,)


ONLY_PLANNED: Final = {
    "zb-h1": _PlannedSchedule("zb-h1", "", 1, "loop", "any", True, lambda pp, rank, _: pp),
    "zb-h2": _PlannedSchedule("zb-h2", "", 1, "loop", "any", True, lambda pp, rank, _: 2 * pp - 1),
}
"""ZB-H1 and ZB-H2 of Qi et al. (arXiv 2401.10241, section 2.2), their handcrafted schedules with one stage per rank.

With ZB-H1 every rank holds as many micro-batches as the
first rank of 1F1B. With ZB-H2 it holds almost twice as many, and no rank waits between its first and last action if F,
B and W take equal time.
"""


def find_planned(name: str) -> StageSchedule:
    """Find a schedule by its name in `parallel.schedule` or torch, the path of a custom one, or `zb-h1` or `zb-h2`."""
    if row := ONLY_PLANNED.get(name.lower()):
        return row
    try:
        return find_schedule(name)
    except ValueError:
        rule = one_of(name, [*SCHEDULES, *ONLY_PLANNED])
        raise UserError(f"The schedule {name!r} must be the path of a .csv file of actions, or {rule}.") from None


def orders_of(schedule: StageSchedule | str, pp: int, chunks: int, micro_batches: int) -> Orders:
    """Return the actions of each pipeline rank in a step, exactly as a run executes them."""
    return _orders_of(checked_schedule(schedule, pp, chunks, micro_batches), pp, chunks, micro_batches)


def program_of(schedule: StageSchedule | str, pp: int, chunks: int, micro_batches: int) -> Program:
    return _program_of(checked_schedule(schedule, pp, chunks, micro_batches), pp, chunks, micro_batches)


@lru_cache(maxsize=64)
def _orders_of(row: StageSchedule, pp: int, chunks: int, micro_batches: int) -> Orders:
    if (given := row.orders(pp, micro_batches)) is not None:
        return given
    if (order := _WRITTEN.get(row.name)) is not None:
        return tuple(order(pp, rank, chunks, micro_batches) for rank in range(pp))
    from threefold.parallel.pipeline.schedules import orders_of_all_ranks  # imports torch

    assert isinstance(row, TorchSchedule)
    return orders_of_all_ranks(row, pp, chunks, micro_batches)


@lru_cache(maxsize=64)
def _program_of(row: StageSchedule, pp: int, chunks: int, micro_batches: int) -> Program:
    return Program(_orders_of(row, pp, chunks, micro_batches))


def checked_schedule(schedule: StageSchedule | str, pp: int, chunks: int, micro_batches: int) -> StageSchedule:
    """Find a schedule, and raise a `UserError` with the nearest numbers that work if it does not support these."""
    row = find_planned(schedule) if isinstance(schedule, str) else schedule
    for number, called in ((pp, "pipeline ranks"), (chunks, "stages on each rank"), (micro_batches, "micro-batches")):
        if number < 1:
            raise UserError(f"The schedule {row.name} has {number} {called} but needs at least 1; use 1.")
    if row.ranks not in (None, pp):
        raise UserError(f"The schedule {row.name} has a line for each of {row.ranks} ranks, not {pp}; use {row.ranks}.")
    needed = row.stages_per_rank
    if needed not in (None, chunks):
        stages = f"{needed} stage{'s' * (needed != 1)}"
        raise UserError(f"The schedule {row.name} has {stages} on each rank, not {chunks}; use {needed}.")
    if not row.accepts(pp, micro_batches):
        rule, use = row.micro_batch_rule(pp, micro_batches), row.micro_batches
        distances = (sign * distance for distance in range(micro_batches + 2 * pp) for sign in (-1, 1))
        nearest = (micro_batches + distance for distance in distances)  # the smaller of two first
        use = use or next(count for count in nearest if count > 0 and row.accepts(pp, count))
        raise UserError(f"The schedule {row.name} cannot have {micro_batches} micro-batches, as it {rule}; use {use}.")
    return row


class HeldPasses(NamedTuple):
    """Peak numbers of passes that a rank holds, each being one micro-batch through one stage from its forward pass on.

    `until_weights` counts those without weight gradients yet, `until_backward` those without their backward pass yet,
    and `deferred` those between the two.
    """

    until_weights: int
    until_backward: int
    deferred: int


def held_by_rank(order: Sequence[Action]) -> HeldPasses:
    changes = {"F": (1, 1, 0), "B": (-1, -1, 0), "I": (0, -1, 1), "W": (-1, 0, -1)}
    peaks = (max(accumulate((changes[kind][each] for _, kind, _ in order), initial=0)) for each in range(3))
    return HeldPasses(*peaks)


def peak_micro_batches(orders: Sequence[Sequence[Action]]) -> list[float]:
    """Return each rank's peak of micro-batches without weight gradients; a pass through one of v stages counts as
    1/v."""
    return [held_by_rank(order).until_weights / _stages_of(order) for order in orders]


def _stages_of(order: Sequence[Action]) -> int:
    return max(1, len({action[0] for action in order}))


MOST_ACTIONS: Final = 3_000_000
"""Largest number of actions to simulate: about a gigabyte of memory and ten seconds."""


@dataclass(frozen=True)
class Simulation:
    """Timeline of one step under a schedule, in the unit of the given times."""

    schedule: StageSchedule
    pp: int
    chunks: int
    micro_batches: int
    timeline: Timeline

    @property
    def peaks(self) -> list[float]:
        return peak_micro_batches(self.timeline.program.orders)

    def facts(self) -> dict[str, Any]:
        """Return the results as JSON values, with times in the unit of the input and lists per pipeline rank."""
        timeline, orders = self.timeline, self.timeline.program.orders
        held = [(held_by_rank(order), _stages_of(order)) for order in orders]
        return {
            "schedule": self.schedule.name,
            "stages": self.pp,
            "chunks": self.chunks,
            "microbatches": self.micro_batches,
            "bubble": timeline.bubble,
            "step_time": timeline.length,
            "longest_stage_time": timeline.longest,
            "peak_microbatches": [int(peak) if peak == int(peak) else peak for peak in self.peaks],
            "peak_before_backward": [each.until_backward / stages for each, stages in held],
            "peak_deferred": [each.deferred / stages for each, stages in held],
            "busy_time": list(timeline.busy),
            "start": [order[0][1] if order else 0.0 for order in timeline.spans],
            "end": [order[-1][2] if order else 0.0 for order in timeline.spans],
        }


def simulated(
    schedule: StageSchedule,
    pp: int,
    chunks: int,
    micro_batches: int,
    passes: Sequence[Sequence[float]],
    transfer: Sequence[float],
) -> Simulation:
    """Simulate a step.

    `passes` (forward, backward for inputs, for weights) each have one time for all ranks, one per rank, whose stages
    share it evenly, or one per stage; `transfer` has one time for all stages, or one from each stage to the next.
    """
    checked_schedule(schedule, pp, chunks, micro_batches)
    ranks = schedule.stage_ranks(pp, chunks)
    actions = len(ranks) * micro_batches * (3 if schedule.defers_weight_gradients else 2)
    if actions > MOST_ACTIONS:
        fitting = max(1, micro_batches * MOST_ACTIONS // actions)
        raise UserError(
            f"The schedule {schedule.name} with {len(ranks):,} stages and {micro_batches:,} micro-batches has "
            f"{actions:,} actions, and at most {MOST_ACTIONS:,} are simulated; use {fitting:,} micro-batches or fewer."
        )
    held, of_stages = Counter(ranks), []
    for given, option in zip(passes, ("--forward", "--backward-input", "--backward-weight"), strict=True):
        if len(given) in (1, pp):
            of_ranks = list(given) * pp if len(given) == 1 else given
            of_stages.append(tuple(of_ranks[rank] / held[rank] for rank in ranks))
        elif len(given) == len(ranks):
            of_stages.append(tuple(given))
        else:
            counts = f"{pp}, one for each stage" if len(ranks) == pp else f"{pp} or {len(ranks)}, one per rank or stage"
            raise UserError(f"{option} has {len(given)} times and needs one for all or {counts}; give one.")
    if not any(map(any, passes)):
        raise UserError("All passes take 0 ms, so that there is nothing to simulate; give --forward a time above 0.")
    if len(transfer) not in (1, len(ranks) - 1):
        between = f"{len(ranks) - 1} of them, one from each of {len(ranks)} stages to the next"
        raise UserError(f"--transfer has {len(transfer)} times and needs one for all or {between}; give one.")
    program = program_of(schedule, pp, chunks, micro_batches)
    timeline = simulate(program, StageTimes(*of_stages), transfer[0] if len(transfer) == 1 else transfer)
    return Simulation(schedule, pp, chunks, micro_batches, timeline)


def step_length(
    schedule: StageSchedule,
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    chunks: int,
    micro_batches: int,
) -> float:
    """Return the seconds from the first to the last action of a step, with each rank's seconds shared by its stages."""
    ranks = len(forward)
    times = share_of_ranks(schedule.stage_ranks(ranks, chunks), forward, backward, weight)

    def length(count: int) -> float:
        return simulate(program_of(schedule, ranks, chunks, count), times).length

    more = max(0, micro_batches // ranks - _ROUNDS)
    fewer = micro_batches - more * ranks
    if not more or not all(schedule.accepts(ranks, count) for count in (fewer, fewer - ranks)):
        return length(micro_batches)
    # Once the pipeline is full, each further round of micro-batches takes as long as the one before.
    return length(fewer) + more * (length(fewer) - length(fewer - ranks))

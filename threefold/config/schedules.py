"""The pipeline schedules, one row each: placement of stages, numbers of micro-batches, deferred weight gradients.

Config checks, stage placement, the memory formulas and the runner read a schedule's properties here. A schedule is a
row of `SCHEDULES`, which runs as a class of `torch.distributed.pipelining`, or a CSV file of actions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from threefold.config.schedule_actions import Orders, read_schedule_file, stage_count
from threefold.plugins import one_of

FILE_SUFFIX: Final = ".csv"


SENDS_UNDER_WAY: Final = 4
"""Sends of a rank that are not waited for yet, where they are operations by themselves: about the last micro-batch each
way, and the one before it."""


class Schedule(ABC):
    """In which order the ranks of a pipeline compute the micro-batches of a step.

    Attributes:
        name: as in `parallel.schedule`.
        stages_per_rank: how many stages each rank has; None where `parallel.stage_chunks` says.
        defers_weight_gradients: whether backward passes defer weight gradients.
        ranks: how many pipeline ranks it is for; None for any.
        micro_batches: how many micro-batches it is for; None where `accepts` says.
    """

    name: str
    stages_per_rank: int | None
    defers_weight_gradients: bool
    ranks: int | None = None
    micro_batches: int | None = None

    @property
    def default_stages_per_rank(self) -> int:
        """Stages of each rank where `parallel.stage_chunks` is not given."""
        return self.stages_per_rank or 2

    @property
    def one_backward_per_micro_batch(self) -> bool:
        """Whether autograd gives each parameter of a rank one gradient for each micro-batch."""
        return self.stages_per_rank == 1 and not self.defers_weight_gradients

    @property
    def sends_apart(self) -> bool:
        """Whether its sends are operations by themselves, not one with a receive."""
        return True

    @abstractmethod
    def stage_ranks(self, pp: int, stages_per_rank: int) -> tuple[int, ...]:
        """The coordinate on the pp axis of each stage.

        Args:
            pp: size of the axis.
            stages_per_rank: as in `parallel.stage_chunks`.
        """

    @abstractmethod
    def accepts(self, pp: int, micro_batches: int) -> bool:
        """Whether it works with so many micro-batches a step."""

    @abstractmethod
    def micro_batch_rule(self, pp: int, micro_batches: int) -> str:
        """What it needs instead of so many micro-batches, after its name."""

    @abstractmethod
    def in_flight(self, pp: int, rank: int, stages_per_rank: int) -> float | None:
        """Micro-batches, of all its stages, whose activations a rank holds at once at most; None for all.

        Micro-batches whose weight gradients wait count as whole ones.
        """


@dataclass(frozen=True)
class MicroBatchRule:
    """Which numbers of micro-batches a schedule works with.

    Attributes:
        accepts: (pp, micro-batches) → whether it works with them.
        sentence: what it needs, after the schedule's name; `{pp}` and `{rounds}` are filled in.
    """

    accepts: Callable[[int, int], bool]
    sentence: str


ANY: Final = MicroBatchRule(lambda pp, count: True, "takes any number of them")
IN_ROUNDS: Final = MicroBatchRule(
    lambda pp, count: count % max(1, count // pp) == 0,
    "runs them in {rounds} equal rounds of at least parallel.pp {pp}",
)
TWO_FOR_EACH_RANK: Final = MicroBatchRule(
    lambda pp, count: count >= 2 * pp, "needs at least 2 for each of the {pp} pipeline ranks"
)


@dataclass(frozen=True)
class TorchSchedule(Schedule):
    """A schedule that `torch.distributed.pipelining` has a class for.

    Attributes:
        name, stages_per_rank, defers_weight_gradients: as `Schedule` says.
        torch_class: name of the class.
        shape: `loop` where stage n is on rank n modulo pp; `v` where the second half of the stages comes back from the
            last rank to the first.
        rule: of its number of micro-batches.
        passes: (pp, rank, stages per rank) → passes of a micro-batch through one stage whose activations a rank holds
            at once at most; None for all.
    """

    name: str
    torch_class: str
    stages_per_rank: int | None
    shape: Literal["loop", "v"]
    rule: MicroBatchRule
    defers_weight_gradients: bool
    passes: Callable[[int, int, int], int] | None

    @property
    def sends_apart(self) -> bool:
        return self.stages_per_rank != 1  # torch has loops of their own for schedules of one stage a rank

    def stage_ranks(self, pp: int, stages_per_rank: int) -> tuple[int, ...]:
        if self.shape == "v":
            return (*range(pp), *reversed(range(pp)))
        return tuple(stage % pp for stage in range(pp * stages_per_rank))

    def accepts(self, pp: int, micro_batches: int) -> bool:
        return self.rule.accepts(pp, micro_batches)

    def micro_batch_rule(self, pp: int, micro_batches: int) -> str:
        return self.rule.sentence.format(pp=pp, rounds=micro_batches // pp)

    def in_flight(self, pp: int, rank: int, stages_per_rank: int) -> float | None:
        return None if self.passes is None else self.passes(pp, rank, stages_per_rank) / stages_per_rank

    def __reduce__(self) -> tuple[Callable[[str], Schedule], tuple[str]]:
        return find_schedule, (self.name,)  # with the config of a run; what a row computes with cannot be pickled


def _warm_up(pp: int, rank: int, stages: int) -> int:
    """Passes before a rank's first backward pass, as Megatron-LM counts them, and that one's."""
    return pp - rank - 1 + (stages - 1) * pp + 1


_ROWS: Final = (
    # name, torch's class, stages per rank, shape, micro-batches, defers weight gradients, passes held at once
    TorchSchedule("1f1b", "Schedule1F1B", 1, "loop", ANY, False, lambda pp, rank, stages: pp - rank),
    TorchSchedule("gpipe", "ScheduleGPipe", 1, "loop", ANY, False, None),
    TorchSchedule(
        "interleaved",
        "ScheduleInterleaved1F1B",
        None,
        "loop",
        IN_ROUNDS,
        False,
        lambda pp, rank, stages: _warm_up(pp, rank, stages) + pp - rank - 1,
    ),
    TorchSchedule("looped-bfs", "ScheduleLoopedBFS", None, "loop", ANY, False, None),
    TorchSchedule(
        "zero-bubble",
        "ScheduleInterleavedZeroBubble",
        None,
        "loop",
        IN_ROUNDS,
        True,
        lambda pp, rank, stages: _warm_up(pp, rank, stages) + rank + 1,
    ),
    TorchSchedule("zbv", "ScheduleZBVZeroBubble", 2, "v", ANY, True, lambda pp, rank, stages: 2 * pp + 2 * rank + 1),
    TorchSchedule(
        "dualpipev",
        "ScheduleDualPipeV",
        2,
        "v",
        TWO_FOR_EACH_RANK,
        True,
        lambda pp, rank, stages: 2 * pp + 1 + rank + 1,
    ),
)
SCHEDULES: Final = {row.name: row for row in _ROWS}
"""Name in `parallel.schedule` → row. The first is the default."""


class FileSchedule(Schedule):
    """A schedule of a CSV file (`schedule_actions` has the format).

    Args:
        path: of the file.
        orders: its actions.
    """

    def __init__(self, path: str, orders: Orders) -> None:
        self.name, self.orders = path, orders
        self.ranks = len(orders)
        self.micro_batches = 1 + max(action.micro_batch for order in orders for action in order)
        self.stages_per_rank = max(len(_stages_of(order)) for order in orders)
        self.defers_weight_gradients = any(action.kind in "IW" for order in orders for action in order)

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        at = {action.stage: rank for rank, order in enumerate(self.orders) for action in order}
        return tuple(at[stage] for stage in range(stage_count(self.orders)))

    def stage_ranks(self, pp: int, stages_per_rank: int) -> tuple[int, ...]:
        return self._ranks

    def accepts(self, pp: int, micro_batches: int) -> bool:
        return micro_batches == self.micro_batches

    def micro_batch_rule(self, pp: int, micro_batches: int) -> str:
        return f"has actions for {self.micro_batches} micro-batch{'es' * (self.micro_batches != 1)}"

    def in_flight(self, pp: int, rank: int, stages_per_rank: int) -> float | None:
        held = most = 0
        for action in self.orders[rank]:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, held)
        return most / len(_stages_of(self.orders[rank]))


def _stages_of(order: Sequence[tuple[int, str, int]]) -> set[int]:
    return {stage for stage, _, _ in order}


def is_schedule_file(name: str) -> bool:
    """Whether `parallel.schedule` names a CSV file."""
    return name.lower().endswith(FILE_SUFFIX)


def schedule_name(given: str) -> str:
    """The name in `SCHEDULES` of what `parallel.schedule` may also call by torch's class, in any case; the path of a
    file as it is.

    Raises:
        ValueError: there is no such schedule; says what there is.
    """
    if is_schedule_file(given):
        return given
    wanted = given.lower().removeprefix("schedule")
    for row in SCHEDULES.values():
        if given.lower() == row.name or wanted == row.torch_class.lower().removeprefix("schedule"):
            return row.name
    names = [*SCHEDULES, *(row.torch_class for row in SCHEDULES.values())]
    raise ValueError(f"the path of a {FILE_SUFFIX} file of actions, or {one_of(given, names)}")


def find_schedule(name: str) -> Schedule:
    """The schedule that `parallel.schedule` names; a file is read and checked.

    Raises:
        UserError: the file cannot be read or its actions break a rule.
        ValueError: there is no such schedule.
    """
    if is_schedule_file(name):
        return FileSchedule(name, read_schedule_file(name))
    return SCHEDULES[schedule_name(name)]

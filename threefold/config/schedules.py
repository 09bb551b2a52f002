"""Pipeline schedules: the table of those that torch has a class for, and what a schedule is.

An attached room adds custom schedules, whose actions a CSV file or a Python function gives (hook `custom_schedule`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from threefold.doors import needed
from threefold.files import shown
from threefold.plugins import is_import_path, one_of

FILE_SUFFIX: Final = ".csv"
SENDS_UNDER_WAY: Final = 4
"""Maximum number of a rank's sends in flight, if sends are separate operations: two micro-batches' each way."""


class Action(NamedTuple):
    """Pass of a micro-batch through a stage: `F` forward, `B` backward, or its parts `I` (input) and `W` (weights)."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Orders = tuple[tuple[Action, ...], ...]  # actions of each pipeline rank, in order


class StageSchedule(ABC):
    """Order in which the ranks of a pipeline compute the micro-batches of a step, named in `parallel.schedule`."""

    name: str
    stages_per_rank: int | None  # None if `parallel.stage_chunks` sets it
    defers_weight_gradients: bool
    ranks: int | None = None  # None for any
    micro_batches: int | None = None  # None if `accepts` decides

    @property
    def default_stages_per_rank(self) -> int:
        """Stages of each rank if `parallel.stage_chunks` is not given."""
        return self.stages_per_rank or 2

    @property
    def one_backward_per_micro_batch(self) -> bool:
        """Whether autograd computes one gradient of each parameter of a rank per micro-batch."""
        return self.stages_per_rank == 1 and not self.defers_weight_gradients

    @property
    def sends_apart(self) -> bool:
        """Whether sends are separate operations, not batched with a receive."""
        return True

    def orders(self, pp: int, micro_batches: int) -> Orders | None:
        """Return the actions of each rank, for numbers that the schedule accepts; None if a class of torch has them."""
        return None

    @abstractmethod
    def stage_ranks(self, pp: int, stages_per_rank: int) -> tuple[int, ...]:
        """Return the pp coordinate of each stage, for a pp axis and number of stages per rank."""

    @abstractmethod
    def accepts(self, pp: int, micro_batches: int) -> bool:
        """Return whether the schedule works with this number of micro-batches per step."""

    @abstractmethod
    def micro_batch_rule(self, pp: int, micro_batches: int) -> str:
        """Return text, to follow the schedule's name, about the number of micro-batches that it needs instead."""

    @abstractmethod
    def in_flight(self, pp: int, rank: int, stages_per_rank: int) -> float | None:
        """Return the peak number of micro-batches, over a rank's stages, whose activations it holds; None for all.

        Micro-batches with deferred weight gradients count in full.
        """


@dataclass(frozen=True)
class TorchSchedule(StageSchedule):
    """Schedule with a class in `torch.distributed.pipelining`."""

    name: str
    torch_class: str
    stages_per_rank: int | None
    shape: Literal["loop", "v"]  # stage n on rank n modulo pp; or the second half returns from the last rank
    rule: Literal["any", "rounds", "two for each rank"]
    defers_weight_gradients: bool
    # (pp, rank, stages per rank) → peak passes of micro-batches whose activations a rank holds; None for all.
    passes: Callable[[int, int, int], int] | None

    @property
    def sends_apart(self) -> bool:
        return self.stages_per_rank != 1  # torch has separate loops for schedules with one stage per rank

    def stage_ranks(self, pp: int, stages_per_rank: int) -> tuple[int, ...]:
        if self.shape == "v":
            return (*range(pp), *reversed(range(pp)))
        return tuple(stage % pp for stage in range(pp * stages_per_rank))

    def accepts(self, pp: int, micro_batches: int) -> bool:
        if self.rule == "rounds":
            return micro_batches % max(1, micro_batches // pp) == 0
        return self.rule == "any" or micro_batches >= 2 * pp

    def micro_batch_rule(self, pp: int, micro_batches: int) -> str:
        if self.rule == "rounds":
            return f"runs them in {micro_batches // pp} equal rounds of at least parallel.pp {pp}"
        if self.rule == "any":
            return "takes any number of them"
        return f"needs at least 2 for each of the {pp} pipeline ranks"

    def in_flight(self, pp: int, rank: int, stages_per_rank: int) -> float | None:
        return None if self.passes is None else self.passes(pp, rank, stages_per_rank) / stages_per_rank

    def __reduce__(self) -> tuple[Callable[[str], StageSchedule], tuple[str]]:
        return find_schedule, (self.name,)  # pickled with a run's config, and a row's functions cannot be pickled


def _warm_up(pp: int, rank: int, stages: int) -> int:
    """Return a rank's forward passes up to the one before its first backward pass, as Megatron-LM counts them."""
    return pp - rank - 1 + (stages - 1) * pp + 1


_ROWS: Final[tuple[tuple[Any, ...], ...]] = (
    # name, torch's class, stages per rank, shape, micro-batches, defers weight gradients, peak passes
    ("1f1b", "Schedule1F1B", 1, "loop", "any", False, lambda pp, rank, _: pp - rank),
    ("gpipe", "ScheduleGPipe", 1, "loop", "any", False, None),
    (
        *("interleaved", "ScheduleInterleaved1F1B", None, "loop", "rounds", False),
        lambda pp, rank, stages: _warm_up(pp, rank, stages) + pp - rank - 1,
    ),
    ("looped-bfs", "ScheduleLoopedBFS", None, "loop", "any", False, None),
    (
        *("zero-bubble", "ScheduleInterleavedZeroBubble", None, "loop", "rounds", True),
        lambda pp, rank, stages: _warm_up(pp, rank, stages) + rank + 1,
    ),
    ("zbv", "ScheduleZBVZeroBubble", 2, "v", "any", True, lambda pp, rank, _: 2 * pp + 2 * rank + 1),
    ("dualpipev", "ScheduleDualPipeV", 2, "v", "two for each rank", True, lambda pp, rank, _: 2 * pp + rank + 2),
)
SCHEDULES: Final = {row[0]: TorchSchedule(*row) for row in _ROWS}
"""Name in `parallel.schedule` → schedule; the first is the default."""


def is_python_schedule(name: str) -> bool:
    """Return whether `parallel.schedule` names a Python function; nothing is imported."""
    return not name.lower().endswith(FILE_SUFFIX) and is_import_path(name)


def is_custom_schedule(name: str) -> bool:
    """Return whether `parallel.schedule` names a CSV file or a Python function."""
    return name.lower().endswith(FILE_SUFFIX) or is_import_path(name)


def schedule_name(given: object) -> str:
    """Return the name in `SCHEDULES` for a name or torch class, in any case, or the path of a custom schedule."""
    if is_custom_schedule(given := str(given)):
        return given
    wanted = given.lower().removeprefix("schedule")
    for row in SCHEDULES.values():
        if given.lower() == row.name or wanted == row.torch_class.lower().removeprefix("schedule"):
            return row.name
    names = [*SCHEDULES, *(row.torch_class for row in SCHEDULES.values())]
    custom = f"a function as in my_file.py:schedule, the path of a {FILE_SUFFIX} file of actions"
    raise ValueError(f"{custom}, or {one_of(given, names)}")


def find_schedule(name: str) -> StageSchedule:
    """Return the schedule that `parallel.schedule` names; raise a `UserError` for a bad file or function."""
    if is_custom_schedule(name):
        found: StageSchedule = needed("custom_schedule", f"parallel.schedule {shown(name)}", "planner")(name)
        return found
    return SCHEDULES[schedule_name(name)]

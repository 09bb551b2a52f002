"""The actions of each rank under any schedule, as data: without ranks, a model or a process group."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from threefold.config.schedule_actions import Action, Orders
from threefold.config.schedules import SCHEDULES, FileSchedule, Schedule, TorchSchedule, find_schedule, is_schedule_file
from threefold.errors import UserError
from threefold.plan.schedule.folded import dualpipev_order, zbv_order
from threefold.plan.schedule.rounds import Rounds, looped_bfs_order
from threefold.plan.schedule.simulator import Program
from threefold.plugins import one_of

RankOrder = Callable[[int, int, int, int], tuple[Action, ...]]
"""From pipeline ranks, a rank, stages of each rank and micro-batches to the actions of the rank."""

_WRITTEN: Final[Mapping[str, RankOrder]] = {
    "1f1b": Rounds(hop=1).order,
    "gpipe": Rounds(hop=None).order,
    "interleaved": Rounds(hop=2).order,
    "looped-bfs": looped_bfs_order,
    "zero-bubble": Rounds(hop=1, wait=1).order,
    "zbv": zbv_order,
    "dualpipev": dualpipev_order,
}
"""Schedules of the config whose actions are written down here, without torch; any other is asked of torch's class."""


@dataclass(frozen=True)
class OneStageZeroBubble(Schedule):
    """ZB-H1 or ZB-H2 of Qi et al. (arXiv 2401.10241, section 2.2), written by hand as there: one stage a rank.

    A run has them as CSV files. ZB-H1 holds as many micro-batches as 1F1B's first rank, on every rank; ZB-H2 almost
    twice as many, with which no rank waits between its first action and its last where F, B and W take the same time.

    Attributes:
        name: `zb-h1` or `zb-h2`.
        hop: as `Rounds` has it; weight gradients wait for so many micro-batches more on each rank.
    """

    name: str
    hop: int
    stages_per_rank = 1
    defers_weight_gradients = True

    @property
    def rounds(self) -> Rounds:
        return Rounds(self.hop, self.hop)

    def stage_ranks(self, pp: int, stages_per_rank: int) -> tuple[int, ...]:
        return tuple(range(pp))

    def accepts(self, pp: int, micro_batches: int) -> bool:
        return True

    def micro_batch_rule(self, pp: int, micro_batches: int) -> str:
        return "takes any number of them"

    def in_flight(self, pp: int, rank: int, stages_per_rank: int) -> float:
        return self.hop * (pp - 1) + 1


ONLY_PLANNED: Final = {row.name: row for row in (OneStageZeroBubble("zb-h1", 1), OneStageZeroBubble("zb-h2", 2))}
"""Schedules that are no rows of the config's table: a run has them as CSV files."""


def find_planned(name: str) -> Schedule:
    """A schedule by its name in `parallel.schedule`, torch's class, the path of a CSV file, or `zb-h1` or `zb-h2`.

    Raises:
        UserError: there is no such schedule, or a file cannot be read or breaks a rule.
    """
    if row := ONLY_PLANNED.get(name.lower()):
        return row
    if is_schedule_file(name):
        return find_schedule(name)
    try:
        return find_schedule(name)
    except ValueError:
        rule = one_of(name, [*SCHEDULES, *ONLY_PLANNED])
        raise UserError(f"The schedule {name!r} must be the path of a .csv file of actions, or {rule}.") from None


def orders_of(schedule: Schedule | str, pp: int, chunks: int, micro_batches: int) -> Orders:
    """For each pipeline rank the actions of a step, exactly those that a run has.

    Args:
        schedule: or its name, as `find_planned` takes it.
        pp: pipeline ranks.
        chunks: stages of each rank.
        micro_batches: of a step.

    Raises:
        UserError: there is no such schedule, or it is not for such numbers; says which are.
    """
    return _orders_of(_checked(schedule, pp, chunks, micro_batches), pp, chunks, micro_batches)


def program_of(schedule: Schedule | str, pp: int, chunks: int, micro_batches: int) -> Program:
    """The same, ready for `simulate`.

    Raises:
        UserError: as `orders_of`.
    """
    return _program_of(_checked(schedule, pp, chunks, micro_batches), pp, chunks, micro_batches)


def _checked(schedule: Schedule | str, pp: int, chunks: int, micro_batches: int) -> Schedule:
    row = find_planned(schedule) if isinstance(schedule, str) else schedule
    check_numbers(row, pp, chunks, micro_batches)
    return row


@lru_cache(maxsize=64)
def _orders_of(row: Schedule, pp: int, chunks: int, micro_batches: int) -> Orders:
    if isinstance(row, FileSchedule):
        return row.orders
    order = row.rounds.order if isinstance(row, OneStageZeroBubble) else _WRITTEN.get(row.name)
    if order is not None:
        return tuple(order(pp, rank, chunks, micro_batches) for rank in range(pp))
    from threefold.parallel.pipeline.torch_schedules import orders_of_all_ranks  # imports torch

    assert isinstance(row, TorchSchedule)
    return orders_of_all_ranks(row, pp, chunks, micro_batches)


@lru_cache(maxsize=64)
def _program_of(row: Schedule, pp: int, chunks: int, micro_batches: int) -> Program:
    return Program(_orders_of(row, pp, chunks, micro_batches))


def check_numbers(row: Schedule, pp: int, chunks: int, micro_batches: int) -> None:
    """Refuse numbers that a schedule is not for.

    Raises:
        UserError: names the number, the rule and the nearest that works.
    """
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
        rule, use = row.micro_batch_rule(pp, micro_batches), _accepted(row, pp, micro_batches)
        raise UserError(f"The schedule {row.name} cannot have {micro_batches} micro-batches, as it {rule}; use {use}.")


def _accepted(row: Schedule, pp: int, micro_batches: int) -> int:
    """The number of micro-batches nearest to the given one that a schedule is for, the smaller of two."""
    if row.micro_batches is not None:
        return row.micro_batches
    away = (
        near
        for distance in range(micro_batches + 2 * pp)
        for near in (micro_batches - distance, micro_batches + distance)
    )
    return next(count for count in away if count > 0 and row.accepts(pp, count))

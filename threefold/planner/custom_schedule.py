"""Custom pipeline schedules: the actions of a CSV file, or of a Python function, and the rules that they keep.

A schedule file has the compute-only CSV format of `torch.distributed.pipelining` (written by `_dump_csv` and read by
`_load_csv` of its schedules): one line per pipeline rank, with comma-separated actions, each a stage, a kind and a
micro-batch, such as `0F0,0F1,0B0,0B1`. Empty fields and the grouping of `(0F2;1B0)OVERLAP_F_B` are ignored.

A schedule in Python is a function of the numbers of pipeline ranks and micro-batches that returns such a list for each
rank, of text or of (stage, kind, micro-batch). It raises a `ValueError` for numbers that it does not support.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Final

from threefold.config.schedules import Action, Orders, StageSchedule, is_python_schedule
from threefold.errors import UserError
from threefold.files import read_text, shown
from threefold.plugins import load_path

LARGEST_FILE: Final = 16 << 20  # size limit of a schedule file in bytes: some two million actions
_ACTION: Final = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")
_OVERLAP: Final = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def custom_schedule(name: str) -> "CustomSchedule":
    """Return the schedule of a file or function that `parallel.schedule` names; raise a `UserError` for a bad one."""
    if is_python_schedule(name):
        return _of_python(name, load_path(name, "parallel.schedule"))
    return CustomSchedule(name, read_schedule_file(name))


class CustomSchedule(StageSchedule):
    """Custom schedule: the actions of a CSV file, or a Python function of (pipeline ranks, micro-batches).

    The number of stages, their ranks and whether weight gradients are deferred follow from the actions, and must not
    depend on the number of micro-batches. The number of stages per rank must not depend on that of the ranks either.
    """

    _MOST: Final = 64
    """Largest numbers of ranks and micro-batches tried to find ones that the function supports."""

    def __init__(self, name: str, given: Orders | Callable[[int, int], Any]) -> None:
        self.name, self._given = name, given
        self._found: Callable[[int, int], Orders | str] = cache(partial(_orders_by, name, given))
        self._example = cache(self._example_of)
        if not callable(given):
            self.ranks = len(given)
            self.micro_batches = 1 + max(action.micro_batch for order in given for action in order)

    def __reduce__(self) -> tuple[Callable[..., StageSchedule], tuple[Any, ...]]:
        return (custom_schedule, (self.name,)) if callable(self._given) else (CustomSchedule, (self.name, self._given))

    def orders(self, pp: int, micro_batches: int) -> Orders:
        """Return the actions of each rank, for numbers that the schedule accepts."""
        orders = self._found(pp, micro_batches)
        if isinstance(orders, str):
            raise UserError(f"parallel.schedule {shown(self.name)} {self.micro_batch_rule(pp, micro_batches)}.")
        known = self._example(pp) or orders
        one, other = ((_ranks_of_stages(each), _defers(each)) for each in (orders, known))
        if one != other:
            counts = f"{micro_batches} micro-batches and with {1 + max(each.micro_batch for each in known[0])}"
            raise UserError(
                f"parallel.schedule {shown(self.name)} differs with {counts} in the ranks of its stages or in "
                "deferring weight gradients; return the same stages for every number of micro-batches."
            )
        return orders

    def accepts(self, pp: int, micro_batches: int) -> bool:
        if self.micro_batches is not None:
            return micro_batches == self.micro_batches
        return not isinstance(self._found(pp, micro_batches), str) and bool(self.orders(pp, micro_batches))

    def micro_batch_rule(self, pp: int, micro_batches: int) -> str:
        if self.micro_batches is not None:
            return f"has actions for {self.micro_batches} micro-batch{'es' * (self.micro_batches != 1)}"
        return f"does not support {micro_batches} of them on {pp} ranks ({self._found(pp, micro_batches)})"

    def stage_ranks(self, pp: int, stages_per_rank: int) -> tuple[int, ...]:
        found = self._example(pp)
        if found is None:
            why = self._found(pp, 2 * pp)
            raise UserError(f"parallel.schedule {shown(self.name)} does not support {pp} pipeline ranks ({why}).")
        return _ranks_of_stages(found)

    def in_flight(self, pp: int, rank: int, stages_per_rank: int) -> float | None:
        found = self._example(pp)
        if found is None:
            return None
        held = most = 0
        for action in found[rank]:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, held)
        holds_all = self.micro_batches is None and most == sum(action.kind == "F" for action in found[rank])
        return None if holds_all else most / _stage_count_of(found[rank])

    @cached_property
    def _any_example(self) -> Orders:
        for pp in range(2, self._MOST + 1):
            if (found := self._example(pp)) is not None:
                return found
        why = self._found(2, 4)
        raise UserError(f"parallel.schedule {shown(self.name)} supports no number of ranks and micro-batches ({why}).")

    def _example_of(self, pp: int) -> Orders | None:
        for count in (4 * pp, 2 * pp, pp, *range(1, self._MOST + 1)):
            if not isinstance(found := self._found(pp, count), str):
                return found
        return None

    @property
    def stages_per_rank(self) -> int:  # type: ignore[override]
        return max(map(_stage_count_of, self._any_example))

    @property
    def defers_weight_gradients(self) -> bool:  # type: ignore[override]
        return _defers(self._any_example)


@cache
def _of_python(name: str, function: Any) -> CustomSchedule:
    if not callable(function):
        raise UserError(f"parallel.schedule is {shown(name)} but that is not a function; name one.")
    return CustomSchedule(name, function)


def _orders_by(name: str, given: Orders | Callable[[int, int], Any], pp: int, micro_batches: int) -> Orders | str:
    """Return the checked actions of a custom schedule, or why it does not support these numbers."""
    if not callable(given):
        return given
    asked = f"parallel.schedule {shown(name)} for {pp} ranks and {micro_batches} micro-batches"
    try:
        ranks = [list(order) for order in given(pp, micro_batches)]
    except ValueError as error:
        return " ".join(str(error).split()) or "a ValueError"
    except Exception as error:
        raised = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"{asked} failed ({raised}); return a list of actions for each rank.") from error
    orders = _Rules(f"{shown(name)} for {pp} ranks and {micro_batches} micro-batches", "rank", first=0).checked(ranks)
    found = len(orders), 1 + max(action.micro_batch for order in orders for action in order)
    if found != (pp, micro_batches):
        raise UserError(f"{asked} has actions for {found[0]} and {found[1]}; return those of the numbers it is given.")
    return orders


def _ranks_of_stages(orders: Orders) -> tuple[int, ...]:
    at = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    return tuple(at[stage] for stage in range(stage_count(orders)))


def _defers(orders: Orders) -> bool:
    return any(action.kind in "IW" for order in orders for action in order)


def _stage_count_of(order: Sequence[Action]) -> int:
    return len({action.stage for action in order})


def read_schedule_file(path: str) -> Orders:
    """Read the actions of a CSV file; raise a `UserError` if it is unreadable, or for the first rule they break."""
    rules = _Rules(shown(path), "line", first=1)
    lines = read_text(Path(path), "the pipeline schedule ", LARGEST_FILE).rstrip().splitlines()
    if not lines:
        raise UserError(f"The pipeline schedule {rules.name} is empty; write one line of actions for each rank.")
    fields = (_OVERLAP.sub(lambda found: found[1].replace(";", ","), line).split(",") for line in lines)
    return rules.checked(filter(None, (field.strip().strip('"') for field in line)) for line in fields)


class _Rules:
    """Rules for a user's actions. Messages number the ranks by the unit (`line` or `rank`) from `first`."""

    def __init__(self, name: str, unit: str, first: int) -> None:
        self.name, self._unit, self._first = name, unit, first
        self._rank_of: dict[int, int] = {}
        self._seen: set[Action] = set()

    def checked(self, ranks: Iterable[Iterable[Any]]) -> Orders:
        """Return the actions of each rank; every stage is complete, on one rank, and can run to its end."""
        orders = tuple(tuple(self._action(each, rank) for each in order) for rank, order in enumerate(ranks))
        if () in orders:
            of_line = f"it has no action, and each {self._unit} is one pipeline rank; leave it out"
            of_rank = "it has no action; return those of its stages"
            raise self.error(orders.index(()), of_rank if self._unit == "rank" else of_line)
        stages, micro_batches = stage_count(orders), 1 + max(action.micro_batch for action in self._seen)
        for stage in range(stages):
            if stage not in self._rank_of:
                raise UserError(
                    f"parallel.schedule {self.name} has actions of {stages - 1} as its last stage but none of stage "
                    f"{stage}; number the stages from 0 without a gap."
                )
        for stage, number in product(range(stages), range(micro_batches)):
            there = {kind for kind in "FBIW" if Action(stage, kind, number) in self._seen}
            lacking = "F" if "F" not in there else "" if "B" in there or there >= {*"IW"} else "B"
            if lacking == "B" and there & {*"IW"}:
                lacking = "W" if "I" in there else "I"
            if lacking:
                rule = f"each stage needs F and B (or I and W) of all {micro_batches} micro-batches; add it"
                raise self.error(self._rank_of[stage], f"{Action(stage, lacking, number)} is missing, and {rule}")
        try:
            for _ in in_order(orders):
                pass
        except StuckError as stuck:
            missing, found = stuck.missing, {each for order in orders for each in order}
            whole = missing._replace(kind="B")  # `B` and `I` both compute the gradient for the previous stage
            needed = whole if missing.kind == "I" and whole in found else missing
            rule = f"it needs {needed}, which comes later or waits for it; move {needed} before it"
            raise self.error(stuck.rank, f"{stuck.action} can never run, as {rule}") from None
        return orders

    def error(self, rank: int, rule: str) -> UserError:
        return UserError(f"parallel.schedule {self.name}, {self._unit} {rank + self._first}: {rule}.")

    def _action(self, given: Any, rank: int) -> Action:
        word = "".join(map(str, given)) if isinstance(given, tuple) else str(given)
        found = _ACTION.fullmatch(word)
        if found is None:
            rule = "must be a stage, one of F, B, I and W, and a micro-batch, such as 0F2, the forward pass of "
            raise self.error(rank, f"{shown(repr(given))} {rule}micro-batch 2 on stage 0")
        action = Action(int(found[1]), found[2], int(found[3]))
        first = self._rank_of.setdefault(action.stage, rank)
        if first != rank:
            rule = f"stage {action.stage} has actions on {self._unit} {first + self._first} already"
            raise self.error(rank, f"{action} cannot be here, as {rule}; put all of a stage on one {self._unit}")
        if action in self._seen:
            raise self.error(rank, f"{action} is there twice; leave one of them out")
        rivals = {"B": "IW", "I": "B", "W": "B"}.get(action.kind, "")
        for rival in (action._replace(kind=kind) for kind in rivals):
            if rival in self._seen:
                raise self.error(rank, f"{action} computes again what {rival} computes; leave one of them out")
        self._seen.add(action)
        return action


class StuckError(ValueError):
    """Deadlock of a schedule: the first `rank` that cannot continue waits before `action` for the result `missing`."""

    def __init__(self, rank: int, action: Action, missing: Action) -> None:
        super().__init__(f"the schedule never gets to {action}, which needs {missing}")
        self.rank, self.action, self.missing = rank, action, missing


def stage_count(orders: Sequence[Sequence[Action]]) -> int:
    """Return the number of stages of the pipeline, which are numbered from 0."""
    return 1 + max((action.stage for order in orders for action in order), default=0)


def in_order(orders: Sequence[Sequence[Action]]) -> Iterator[tuple[int, Action, int]]:
    """Yield all actions in an order that respects dependencies and the order within each rank, in linear time.

    A forward pass depends on the forward pass of the previous stage; a backward pass on the forward pass of its own
    stage and the backward pass of the next stage; weight gradients on the backward pass of their own stage. Beside the
    rank and the action comes the index of the neighboring stage's action that it depends on, or -1. Raises `StuckError`
    if no rank can continue.
    """
    stages = stage_count(orders)
    count = 1 + max((action.micro_batch for order in orders for action in order), default=0)
    backward = stages * count  # results as numbers: first all forward passes, then all backward passes
    made: dict[int, int] = {}
    waiting: dict[int, list[int]] = {}
    following, ready, number = [0] * len(orders), list(reversed(range(len(orders)))), 0
    while ready:
        rank = ready.pop()
        order, place = orders[rank], following[rank]
        while place < len(order):
            action = order[place]
            stage, kind, micro_batch = action
            own = other = result = -1
            forward = stage * count + micro_batch
            if kind == "F":
                other, result = forward - count if stage else -1, forward
            elif kind == "W":
                own = backward + forward
            else:
                own, result = forward, backward + forward
                other = result + count if stage + 1 < stages else -1
            missing = own if own >= 0 and own not in made else other if other >= 0 and other not in made else -1
            if missing >= 0:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, action, made[other] if other >= 0 else -1
            if result >= 0:
                made[result] = number
                if result in waiting:
                    ready += waiting.pop(result)
            number += 1
            place += 1
        following[rank] = place
    waits = {rank: result for result, ranks in waiting.items() for rank in ranks}
    if waits:
        rank = min(waits)
        of_backward, place = divmod(waits[rank], backward)
        missed = Action(place // count, "I" if of_backward else "F", place % count)
        raise StuckError(rank, orders[rank][following[rank]], missed)

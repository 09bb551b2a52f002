"""Result of `threefold.explain`: the collectives of a step in order, to be filtered, read and shown in a notebook."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from html import escape
from typing import Any, Final

from torch import Tensor

from threefold.config import Config
from threefold.errors import UserError


@dataclass(eq=False)
class LessonEvent:
    """One collective on one rank.

    Attributes:
        number: place among the collectives of all ranks, in the order in which these ran.
        rank, order: rank, and place among its own collectives, from 1.
        phase: `forward`, `backward`, `gradient sync`, `update`, …; `batch` before the first pass.
        stage, micro_batch: pipeline stage and micro-batch of the phase.
        axis: axis of the mesh, or the name of a further group such as `tie`.
        ranks: ranks that take part; sender and receiver of a send.
        operation: one of the operations of `threefold.comm.heartbeat`.
        module: module that calls it, or the parameters that it is of.
        shape, dtype: those of the tensor that it is called with.
        nbytes: bytes of the unsharded tensor, as `Event` counts them.
        source: file and line of the package.
        sent, received: tensors that this rank gives, and those that it gets; empty if `explain` has `values=False`.
        call: number that the events of one collective share.
    """

    number: int
    rank: int
    order: int
    phase: str
    stage: int
    micro_batch: int
    axis: str
    operation: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    source: str
    ranks: tuple[int, ...] = ()
    sent: tuple[Tensor, ...] = field(default=(), repr=False)
    received: tuple[Tensor, ...] = field(default=(), repr=False)
    call: int = field(default=0, repr=False)

    def __str__(self) -> str:
        return f"rank {self.rank}: " + "  ".join(each for each in _cells([self])[1:] if each)


@dataclass(frozen=True)
class LessonPass:
    """Pass of a micro-batch through a stage, or a part of one, on one rank.

    Attributes:
        rank: rank of the stage.
        phase: `forward`, `backward`, or `input gradients` and `weight gradients`, the two parts of a backward pass.
        stage, micro_batch: pipeline stage, and number of the micro-batch.
    """

    rank: int
    phase: str
    stage: int
    micro_batch: int

    @property
    def mark(self) -> str:
        """Letter of the pass with the number of the micro-batch, as in `F0`."""
        return f"{_MARKS[self.phase]}{self.micro_batch}"


_MARKS: Final = {"forward": "F", "backward": "B", "input gradients": "I", "weight gradients": "W"}
_HEADINGS: Final = (
    "ranks",
    "phase",
    "axis",
    "collective",
    "module or parameters",
    "shape",
    "dtype",
    "bytes",
    "called by",
)
_RIGHT: Final = ("bytes",)


@dataclass(frozen=True, eq=False)
class Lesson:
    """Training step of a layout, whose ranks were threads of one process.

    It iterates over its events; `str()` and a notebook show them as a table. `filter` returns a lesson with some of
    them.

    Attributes:
        layout: layout, in the words of `explain`.
        config: resolved config of the step.
        events: collectives of the step, in the order in which they ran.
        passes: forward and backward passes of all ranks, in the same order.
        coordinates: rank → its index on each axis.
        loss: mean loss of the global batch.
        gradients: whole gradient of each trained parameter, before the update, put together from the ranks' shards.
        expected_loss, expected_gradients: those of one process, with the plain model on the same batch.
        reduced: what was reduced of a large model, such as `12 → 3 layers`.
    """

    layout: str
    config: Config = field(repr=False)
    events: tuple[LessonEvent, ...]
    passes: tuple[LessonPass, ...]
    coordinates: tuple[Mapping[str, int], ...]
    loss: float
    gradients: Mapping[str, Tensor] = field(repr=False)
    expected_loss: float
    expected_gradients: Mapping[str, Tensor] = field(repr=False)
    reduced: tuple[str, ...] = ()

    @property
    def difference(self) -> float:
        """Largest difference of a gradient from that of one process, relative to the parameter's largest gradient."""
        found = 0.0
        for name, whole in self.expected_gradients.items():
            largest = float(whole.abs().max()) if whole.numel() else 0.0
            apart = float((self.gradients[name] - whole).abs().max()) if whole.numel() else 0.0
            found = max(found, apart / (largest or 1.0))
        return found

    def filter(
        self,
        *,
        rank: int | None = None,
        axis: str | None = None,
        module: str | None = None,
        operation: str | None = None,
        phase: str | None = None,
        micro_batch: int | None = None,
    ) -> "Lesson":
        """Return the lesson with the events that have all of these; `module` is a pattern such as `blocks.0.*`.

        Raises:
            UserError: no rank, axis, module, operation or phase of the step is called that.
        """
        size = len(self.coordinates)
        if rank is not None and rank not in range(size):
            raise UserError(f"rank is {rank} but the layout {self.layout} has ranks 0 to {size - 1}; use {size - 1}.")
        for name, wanted in (("axis", axis), ("operation", operation), ("phase", phase)):
            known = list(dict.fromkeys(getattr(event, name) for event in self.events))
            if wanted is not None and self.events and wanted not in known:
                close = get_close_matches(wanted, known, n=1, cutoff=0)[0]
                raise UserError(f"{name} is {wanted!r} but the step has {', '.join(known)}; use {close!r}.")
        wanted_facts = {"rank": rank, "axis": axis, "operation": operation, "phase": phase, "micro_batch": micro_batch}
        facts = {name: value for name, value in wanted_facts.items() if value is not None}
        events = [
            event
            for event in self.events
            if all(getattr(event, name) == value for name, value in facts.items())
            and (module is None or fnmatchcase(event.module, module))
        ]
        if module is not None and not events and not facts:
            known = list(dict.fromkeys(event.module for event in self.events if event.module))
            close = (get_close_matches(module, known, n=1, cutoff=0) or ["*"])[0]
            raise UserError(f"module is {module!r} but no collective is of such a module; use {close!r}.")
        passes = [each for each in self.passes if rank is None or each.rank == rank]
        return replace(self, events=tuple(events), passes=tuple(passes))

    def __iter__(self) -> Iterator[LessonEvent]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __getitem__(self, place: int) -> LessonEvent:
        return self.events[place]

    @property
    def order(self) -> str:
        """Passes of each rank in order, a line each: forward (F) and backward (B) with the micro-batch's number."""
        lines = []
        for rank, place in enumerate(self.coordinates):
            marks = " ".join(_marked(each, self.passes) for each in self.passes if each.rank == rank)
            if marks:
                at = " ".join(f"{axis} {index}" for axis, index in place.items() if self._size(axis) > 1)
                lines.append(f"rank {rank} ({at}): {marks}" if at else f"rank {rank}: {marks}")
        return "\n".join(lines)

    def table(self) -> str:
        """Return the events as a table, one row for the ranks that make the same collective together."""
        rows = [_HEADINGS, *(_cells(events) for events in self._together())]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
        lines = [
            "  ".join(
                cell.rjust(width) if heading in _RIGHT else cell.ljust(width)
                for cell, width, heading in zip(row, widths, _HEADINGS, strict=True)
            ).rstrip()
            for row in rows
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self._summary()}\n\n{self.order}\n\n{self.table()}"

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:left'>{escape(each)}</th>" for each in _HEADINGS)
        rows = []
        for events in self._together():
            cells = "".join(f"<td style='text-align:left'>{escape(each)}</td>" for each in _cells(events))
            rows.append(f"<tr title='{escape(_tip(events), quote=True)}'>{cells}</tr>")
        return (
            f"<p>{escape(self._summary())}</p><pre>{escape(self.order)}</pre>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        )

    def _summary(self) -> str:
        sent = sum(event.nbytes for event in self.events)
        return (
            f"{self.layout}: loss {self.loss:.6f} (one process: {self.expected_loss:.6f}), gradients equal to one "
            f"process within {self.difference:.0e}; {len(self.events)} collectives on {len(self.coordinates)} ranks, "
            f"{sent:,} bytes" + (f" (reduced: {', '.join(self.reduced)})" if self.reduced else "")
        )

    def _size(self, axis: str) -> int:
        return 1 + max(place[axis] for place in self.coordinates)

    def _together(self) -> list[list[LessonEvent]]:
        found: dict[Any, list[LessonEvent]] = {}
        for event in self.events:
            found.setdefault((event.call, *_facts(event)), []).append(event)
        return list(found.values())


def _facts(event: LessonEvent) -> tuple[Any, ...]:
    return event.phase, event.micro_batch, event.axis, event.operation, event.module, event.shape


def _cells(events: Sequence[LessonEvent]) -> tuple[str, ...]:
    event = events[0]
    arrow = event.operation == "send" and len(event.ranks) == 2
    ranks = " → ".join(map(str, event.ranks)) if arrow else " ".join(map(str, sorted(each.rank for each in events)))
    phase = event.phase
    if phase in _MARKS:
        phase += f" {event.micro_batch}"
    shape = " × ".join(map(str, event.shape)) or "1"
    return (
        *(ranks, phase, event.axis, event.operation, event.module, shape, event.dtype),
        *(f"{event.nbytes:,}", event.source),
    )


def _marked(each: LessonPass, passes: Sequence[LessonPass]) -> str:
    """Return a pass's mark, with its stage if its rank has several."""
    several = len({other.stage for other in passes if other.rank == each.rank}) > 1
    return f"{each.mark}@{each.stage}" if several else each.mark


def _tip(events: Sequence[LessonEvent]) -> str:
    """Return the values of the first tensors, short."""
    lines = []
    for event in events:
        for name, tensors in (("gives", event.sent), ("gets", event.received)):
            if tensors:
                values = [f"{value:.4g}" for value in tensors[0].flatten()[:6].tolist()]
                more = ", …" if tensors[0].numel() > 6 else ""
                lines.append(f"rank {event.rank} {name} {', '.join(values)}{more}")
    return "\n".join(lines)

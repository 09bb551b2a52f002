"""Heartbeats: each rank writes what it is doing into a page of memory that other processes can read at any time.

The page holds a few integers: a count that grows with all progress, the rank's position (step, micro-batch, stage), and
the collective that it waits in. A write takes a fraction of a microsecond and no system call. A thread of the rank
increments another count, which distinguishes a stopped process from a waiting one.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

PAGE_BYTES: Final = 4096
_HEADER_BYTES: Final = 128
_BEATS, _PROGRESS, _SECTION, _STEP, _ACTIVITY, _WAIT, _WAITED, _TEXT_BYTES, _ASKED, _ANSWERED = range(10)
_WORKED, _ASIDE, _MEMORY = 10, 11, 12
_STAGE_BITS, _MICRO_BATCH_BITS = 8, 24
_MOST_LISTED_RANKS = 64

OPERATIONS: Final = (
    "all_reduce",
    "all_reduce_max",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send",
    "receive",
    "broadcast",
    "gather",
    "barrier",
)
"""Collectives that a rank can wait in."""
_AXES_PER_OPERATION = 256


class RunSection(IntEnum):
    """Part of a run that a rank is in."""

    NOTHING = 0
    START = 1
    STEP = 2
    EVALUATION = 3
    SAVE = 4
    END = 5


class Activity(IntEnum):
    """Activity of a rank within a section of the run."""

    NOTHING = 0
    JOIN = 1
    MESH = 2
    DATA = 3
    MODEL = 4
    RESTORE = 5
    CALLBACK = 6
    FORWARD = 7
    BACKWARD = 8
    WEIGHT_GRADIENTS = 9
    PIPELINE = 10
    GRADIENT_SUM = 11
    UPDATE = 12
    INPUT_GRADIENTS = 13


_SECTIONS: Final = {
    RunSection.NOTHING: "before its start-up",
    RunSection.START: "in start-up",
    RunSection.STEP: "in step {step}",
    RunSection.EVALUATION: "in the evaluation after step {step}",
    RunSection.SAVE: "in the save after step {step}",
    RunSection.END: "after its last step",
}
_ACTIVITIES: Final = {
    Activity.JOIN: "joining the process group",
    Activity.MESH: "making the mesh",
    Activity.DATA: "reading data",
    Activity.MODEL: "making the model",
    Activity.RESTORE: "loading its starting point",
    Activity.CALLBACK: "in the callback {name}",
    Activity.FORWARD: "in the forward pass of micro-batch {micro_batch} in stage {stage}",
    Activity.BACKWARD: "in the backward pass of micro-batch {micro_batch} in stage {stage}",
    Activity.INPUT_GRADIENTS: "in the backward pass of micro-batch {micro_batch} in stage {stage}",
    Activity.WEIGHT_GRADIENTS: "in the weight gradients of micro-batch {micro_batch} in stage {stage}",
    Activity.PIPELINE: "between two actions of the pipeline",
    Activity.GRADIENT_SUM: "in the gradient sum",
    Activity.UPDATE: "in the update",
}


class Wait(NamedTuple):
    """Collective of `OPERATIONS`, on the named axis, that a rank waits in; `ranks` is None if unknown."""

    operation: str
    axis: str
    ranks: tuple[int, ...] | None

    def __str__(self) -> str:
        return f"{self.operation} over {self.axis}"


@dataclass(frozen=True)
class RankState:
    """State of a rank, as read from its page.

    Attributes:
        beats: count of the heartbeat thread; does not grow while the process is stopped.
        progress: count that grows whenever the rank begins or ends something.
        section, step, activity, stage, micro_batch: current position of the rank; steps count from 1, the others from
            0.
        wait: collective that the rank waits in.
        waited: seconds waited in collectives, without the current one.
        aside: seconds spent, without waiting, on work that ranks do not share evenly: saving, and callbacks of one
            rank.
        worked: seconds in which the process had work for a processor, as its heartbeat thread reported.
        name: name of the callback that is running.
        process: identifier of the process, if the rank has set one.
        answered: whether the rank has done the work requested with `ask`.
        memory: peak memory in bytes; 0 if not reported.
    """

    beats: int = 0
    progress: int = 0
    section: RunSection = RunSection.NOTHING
    step: int = 0
    activity: Activity = Activity.NOTHING
    stage: int = 0
    micro_batch: int = 0
    wait: Wait | None = None
    waited: float = 0.0
    aside: float = 0.0
    worked: float = 0.0
    name: str = ""
    process: str = ""
    answered: bool = False
    memory: int = 0

    def __str__(self) -> str:
        """Describe the state, such as `in the forward pass of micro-batch 3 in stage 1 in step 7`."""
        values = {"step": self.step, "stage": self.stage, "micro_batch": self.micro_batch, "name": self.name}
        parts = [_ACTIVITIES.get(self.activity, ""), _SECTIONS[self.section]]
        return " ".join(part.format(**values) for part in parts if part)


Page = memoryview
"""`PAGE_BYTES` writable bytes."""


class Heartbeat:
    """Writer of this rank's state into its page.

    Only the training thread calls its methods, except `beat` and `answer`, which belong to the heartbeat thread.

    Args:
        page: memory that others read; None for private memory, which nobody reads.
        everyone: function that reads the pages of all ranks, by rank (None for an unknown one); by default only this
            rank's page is known.
    """

    def __init__(
        self, page: Page | None = None, everyone: Callable[[], Sequence[RankState | None]] | None = None
    ) -> None:
        self._page = memoryview(bytearray(PAGE_BYTES)) if page is None else page
        self._numbers = self._page[:_HEADER_BYTES].cast("q")
        self._everyone = everyone
        self._axes: list[tuple[str, str]] = []
        self._names: list[str] = []
        self._process = ""
        self._since = 0
        self._aside: tuple[int, int] | None = None
        self._saves = False

    # -- written by the training thread
    # ----------------------------------------------------------------------------------

    def section(self, section: RunSection, step: int = 0) -> None:
        """Begin a part of the run; the first step is 1."""
        numbers = self._numbers
        if numbers[_WAIT]:
            self.resume()
        numbers[_SECTION], numbers[_STEP], numbers[_ACTIVITY] = section, step, Activity.NOTHING
        numbers[_PROGRESS] += 1
        self._end_aside()
        self._saves = section is RunSection.SAVE
        if self._saves:
            self._begin_aside()

    def activity(self, activity: Activity, stage: int = 0, micro_batch: int = 0) -> None:
        """Begin another activity within the section, which ends a wait."""
        numbers = self._numbers
        if numbers[_WAIT]:
            self.resume()
        numbers[_ACTIVITY] = activity | stage << _STAGE_BITS | micro_batch << _MICRO_BATCH_BITS
        numbers[_PROGRESS] += 1
        if self._aside is not None and not self._saves:
            self._end_aside()

    def callback(self, name: str, alone: bool = False) -> None:
        """Begin a method of a callback; `alone` if only this rank has the callback."""
        if name not in self._names:
            self._names.append(name)
            self._write_text()
        self.activity(Activity.CALLBACK, self._names.index(name))
        if alone and not self._saves:
            self._begin_aside()

    def _begin_aside(self) -> None:
        self._aside = (time.monotonic_ns(), self._numbers[_WAITED])

    def _end_aside(self) -> None:
        if self._aside is not None:
            (since, waited), self._aside = self._aside, None
            self._numbers[_ASIDE] += time.monotonic_ns() - since - (self._numbers[_WAITED] - waited)

    def progress(self) -> None:
        """Note progress within an activity, such as another tensor of a checkpoint."""
        self._numbers[_PROGRESS] += 1

    def axis(self, name: str, ranks: Sequence[int]) -> int:
        """Add an axis whose collectives this rank will wait in; return its number for `wait_code`."""
        entry = (name, _written(ranks))
        if entry not in self._axes:
            self._axes.append(entry)
            self._write_text()
        return min(self._axes.index(entry), _AXES_PER_OPERATION - 2)

    def wait(self, code: int) -> None:
        """Begin to wait in a collective, given its `wait_code`."""
        numbers = self._numbers
        numbers[_WAIT] = code
        numbers[_PROGRESS] += 1
        self._since = time.monotonic_ns()

    def resume(self) -> None:
        """End the wait in a collective, if there is one."""
        numbers = self._numbers
        if not numbers[_WAIT]:
            return
        numbers[_WAITED] += time.monotonic_ns() - self._since
        numbers[_WAIT] = 0
        numbers[_PROGRESS] += 1

    @contextmanager
    def waiting(self, code: int) -> Iterator[None]:
        """Note that this rank waits during a block; afterwards restore the wait around it."""
        before = self._numbers[_WAIT]
        self.wait(code)
        try:
            yield
        finally:
            self.resume()
            if before:
                self.wait(before)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Note that this rank works during a block within a wait, such as a call from another library's collective."""
        code = self._numbers[_WAIT]
        self.resume()
        try:
            yield
        finally:
            if code:
                self.wait(code)

    def memory(self, largest: int) -> None:
        """Report this rank's peak memory in bytes."""
        self._numbers[_MEMORY] = largest

    # -- written by the heartbeat thread
    # ---------------------------------------------------------------------------------

    def beat(self, worked: float = 0.0) -> None:
        """Report that the process runs, and that it has had work for a processor for `worked` seconds in total."""
        self._numbers[_WORKED] = int(worked * 1e9)
        self._numbers[_BEATS] += 1

    def identify(self, process: str) -> None:
        """Publish an identifier of this process."""
        self._process = process
        self._write_text()

    @property
    def is_asked(self) -> bool:
        """Whether a reader of the page has requested work of the heartbeat thread that is not done yet."""
        return bool(self._numbers[_ASKED] and not self._numbers[_ANSWERED])

    def answer(self) -> None:
        """Report that the requested work is done."""
        self._numbers[_ANSWERED] = 1

    @property
    def waited(self) -> float:
        """Seconds that this rank has waited in collectives, without the current one."""
        return float(self._numbers[_WAITED]) / 1e9

    # -- reading
    # ---------------------------------------------------------------------------------------------------------

    def place(self) -> RankState:
        """Read this rank's own state."""
        return read(self._page)

    def content(self) -> bytes:
        """Return the used part of the page as bytes."""
        return bytes(self._page[: _HEADER_BYTES + self._numbers[_TEXT_BYTES]])

    def everyone(self) -> Sequence[RankState | None]:
        """Read the state of each rank, by rank; None if unknown."""
        return [self.place()] if self._everyone is None else self._everyone()

    def _write_text(self) -> None:
        """Write the names; if the page is full, the last axes stay unnamed."""
        axes = list(self._axes)
        while True:
            known = {"process": self._process, "names": self._names, "axes": axes}
            text = json.dumps(known, separators=(",", ":"), ensure_ascii=True).encode()
            if len(text) <= len(self._page) - _HEADER_BYTES or not axes:
                break
            axes.pop()
        text = text[: len(self._page) - _HEADER_BYTES]
        self._numbers[_TEXT_BYTES] = 0  # so that no reader sees half of it
        self._page[_HEADER_BYTES : _HEADER_BYTES + len(text)] = text
        self._numbers[_TEXT_BYTES] = len(text)


def wait_code(operation: str, axis: int) -> int:
    """Encode one of `OPERATIONS` on an axis, given its number from `Heartbeat.axis`, for `Heartbeat.wait`."""
    return 1 + axis + _AXES_PER_OPERATION * OPERATIONS.index(operation)


def ask(page: Page) -> None:
    """Request the page owner's heartbeat thread to do its work and `answer`."""
    page[:_HEADER_BYTES].cast("q")[_ASKED] = 1


def read(page: Page | bytes) -> RankState:
    """Read the state of a rank from its page."""
    numbers = memoryview(page)[:_HEADER_BYTES].cast("q")
    activity, wait = numbers[_ACTIVITY], numbers[_WAIT]
    text = bytes(page[_HEADER_BYTES : _HEADER_BYTES + numbers[_TEXT_BYTES]])
    try:
        known = json.loads(text)
    except ValueError:  # nothing there yet, or just being written
        known = {"process": "", "names": [], "axes": []}
    stage, kind = activity >> _STAGE_BITS & 0xFFFF, Activity(activity & 0xFF)
    names = known["names"]
    return RankState(
        beats=numbers[_BEATS],
        progress=numbers[_PROGRESS],
        section=RunSection(numbers[_SECTION]),
        step=numbers[_STEP],
        activity=kind,
        stage=stage,
        micro_batch=activity >> _MICRO_BATCH_BITS,
        wait=wait_of(wait, known["axes"]) if wait else None,
        waited=numbers[_WAITED] / 1e9,
        aside=numbers[_ASIDE] / 1e9,
        worked=numbers[_WORKED] / 1e9,
        name=names[stage] if kind is Activity.CALLBACK and stage < len(names) else "",
        process=known["process"],
        answered=bool(numbers[_ANSWERED]),
        memory=numbers[_MEMORY],
    )


def wait_of(code: int, axes: Sequence[tuple[str, str]]) -> Wait:
    """Decode a `wait_code`, given the name and the ranks (as text) of each axis."""
    operation, axis = divmod(code - 1, _AXES_PER_OPERATION)
    if axis >= len(axes):
        return Wait(OPERATIONS[operation], "an axis", None)
    name, ranks = axes[axis]
    return Wait(OPERATIONS[operation], name, _ranks(ranks))


def _written(ranks: Sequence[int]) -> str:
    """Write ranks as text: `first:end:distance` if evenly spaced, a list if they are few, else nothing."""
    distance = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    spaced = range(ranks[0], ranks[0] + distance * len(ranks), distance or 1)
    if list(spaced) == list(ranks):
        return f"{spaced.start}:{spaced.stop}:{spaced.step}"
    return ",".join(map(str, ranks)) if len(ranks) <= _MOST_LISTED_RANKS else ""


def _ranks(text: str) -> tuple[int, ...] | None:
    if ":" in text:
        return tuple(range(*map(int, text.split(":"))))
    return tuple(map(int, text.split(","))) if text else None


class ObservedHeartbeat(Heartbeat):
    """Heartbeat that replaces another one, writes to its page, and notifies an observer in the writing thread.

    A separate class, so that heartbeats without an observer are not slowed down. The observer has the methods
    `section(section, step)`, `activity(activity, stage, micro_batch, name)`, `wait(operation, axis)` and `resume()`;
    each of the first three ends what the last call of it began, and a section ends the current activity.
    """

    def __init__(self, heartbeat: Heartbeat, observer: Any) -> None:
        vars(self).update(vars(heartbeat))
        self._observer, self._waits = observer, False
        self._known: dict[int, Wait] = {}

    def section(self, section: RunSection, step: int = 0) -> None:
        super().section(section, step)
        self._observer.section(section, step)

    def activity(self, activity: Activity, stage: int = 0, micro_batch: int = 0) -> None:
        super().activity(activity, stage, micro_batch)
        name = self._names[stage] if activity is Activity.CALLBACK else ""
        self._observer.activity(activity, stage, micro_batch, name)

    def wait(self, code: int) -> None:
        super().wait(code)
        if code not in self._known:
            self._known[code] = wait_of(code, self._axes)
        self._waits = True
        self._observer.wait(self._known[code].operation, self._known[code].axis)

    def resume(self) -> None:
        super().resume()
        if self._waits:
            self._waits = False
            self._observer.resume()

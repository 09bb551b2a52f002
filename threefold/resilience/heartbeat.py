"""Heartbeats in memory: each rank writes what it is doing into a page that other processes can read at any time.

A write takes a fraction of a microsecond and no system call. The page holds a few integers: a count that grows with all
progress, another one that a thread increments, which distinguishes a stopped process from a waiting one, the rank's
position, and the collective that it waits in. The names of axes and callbacks follow as JSON. `rank_state` reads it.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from threefold.comm.heartbeat import AXES_PER_OPERATION, OPERATIONS, Activity, Heartbeat, RunSection

PAGE_BYTES: Final = 4096
HEADER_BYTES: Final = 128
STAGE_BITS, MICRO_BATCH_BITS = 8, 24
_MOST_LISTED_RANKS = 64


class Slot:
    """Positions of the integers in a page."""

    BEATS, PROGRESS, SECTION, STEP, ACTIVITY, WAIT, WAITED, TEXT_BYTES, ASKED, ANSWERED = range(10)
    WORKED, ASIDE, MEMORY = 10, 11, 12


Page = memoryview
"""`PAGE_BYTES` writable bytes."""


class Wait(NamedTuple):
    """Collective of `OPERATIONS`, on the named axis, that a rank waits in; `ranks` is None if unknown."""

    operation: str
    axis: str
    ranks: tuple[int, ...] | None

    def __str__(self) -> str:
        return f"{self.operation} over {self.axis}"


class PageHeartbeat(Heartbeat):
    """Writer of this rank's state into its page, by default into private memory, which nobody reads.

    Only the training thread calls the methods that write.
    `everyone` returns the states of all ranks, by rank, as `rank_state` reads them from their pages, None
    for an unknown one; by default there are none.
    """

    def __init__(self, page: Page | None = None, everyone: Callable[[], Sequence[Any]] = tuple) -> None:
        self._page = memoryview(bytearray(PAGE_BYTES)) if page is None else page
        self._numbers = self._page[:HEADER_BYTES].cast("q")
        self.everyone = everyone
        self._axes: list[tuple[str, str]] = []
        self._names: list[str] = []
        self._process = ""
        self._since = 0
        self._aside: tuple[int, int] | None = None
        self._saves = False

    def section(self, section: RunSection, step: int = 0) -> None:
        """Begin a part of the run; the first step is 1."""
        numbers = self._numbers
        if numbers[Slot.WAIT]:
            self.resume()
        numbers[Slot.SECTION], numbers[Slot.STEP], numbers[Slot.ACTIVITY] = section, step, Activity.NOTHING
        numbers[Slot.PROGRESS] += 1
        self._end_aside()
        self._saves = section is RunSection.SAVE
        if self._saves:
            self._begin_aside()

    def activity(self, activity: Activity, stage: int = 0, micro_batch: int = 0) -> None:
        """Begin another activity within the section, which ends a wait."""
        numbers = self._numbers
        if numbers[Slot.WAIT]:
            self.resume()
        numbers[Slot.ACTIVITY] = activity | stage << STAGE_BITS | micro_batch << MICRO_BATCH_BITS
        numbers[Slot.PROGRESS] += 1
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
        self._aside = (time.monotonic_ns(), self._numbers[Slot.WAITED])

    def _end_aside(self) -> None:
        if self._aside is not None:
            (since, waited), self._aside = self._aside, None
            self._numbers[Slot.ASIDE] += time.monotonic_ns() - since - (self._numbers[Slot.WAITED] - waited)

    def progress(self) -> None:
        """Note progress within an activity, such as another tensor of a checkpoint."""
        self._numbers[Slot.PROGRESS] += 1

    def axis(self, name: str, ranks: Sequence[int]) -> int:
        """Add an axis whose collectives this rank will wait in; return its number for `wait_code`."""
        entry = (name, _text_of(ranks))
        if entry not in self._axes:
            self._axes.append(entry)
            self._write_text()
        return min(self._axes.index(entry), AXES_PER_OPERATION - 2)

    def wait(self, code: int) -> None:
        """Begin to wait in a collective, given its `wait_code`."""
        numbers = self._numbers
        numbers[Slot.WAIT] = code
        numbers[Slot.PROGRESS] += 1
        self._since = time.monotonic_ns()

    def resume(self) -> None:
        """End the wait in a collective, if there is one."""
        numbers = self._numbers
        if not numbers[Slot.WAIT]:
            return
        numbers[Slot.WAITED] += time.monotonic_ns() - self._since
        numbers[Slot.WAIT] = 0
        numbers[Slot.PROGRESS] += 1

    @contextmanager
    def waiting(self, code: int) -> Iterator[None]:
        """Note that this rank waits during a block; afterwards restore the wait around it."""
        before = self._numbers[Slot.WAIT]
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
        code = self._numbers[Slot.WAIT]
        self.resume()
        try:
            yield
        finally:
            if code:
                self.wait(code)

    def memory(self, largest: int) -> None:
        """Report this rank's peak memory in bytes."""
        self._numbers[Slot.MEMORY] = largest

    @property
    def waited(self) -> float:
        """Seconds that this rank has waited in collectives, excluding the current one."""
        return float(self._numbers[Slot.WAITED]) / 1e9

    @property
    def progressed(self) -> int:
        """Count that grows whenever the rank begins or ends something."""
        return int(self._numbers[Slot.PROGRESS])

    def content(self) -> bytes:
        """Return the used part of the page as bytes."""
        return bytes(self._page[: HEADER_BYTES + self._numbers[Slot.TEXT_BYTES]])

    def _write_text(self) -> None:
        """Write the names; if the page is full, the last axes stay unnamed."""
        axes = list(self._axes)
        while True:
            known = {"process": self._process, "names": self._names, "axes": axes}
            text = json.dumps(known, separators=(",", ":"), ensure_ascii=True).encode()
            if len(text) <= len(self._page) - HEADER_BYTES or not axes:
                break
            axes.pop()
        text = text[: len(self._page) - HEADER_BYTES]
        self._numbers[Slot.TEXT_BYTES] = 0  # so that no reader sees half of it
        self._page[HEADER_BYTES : HEADER_BYTES + len(text)] = text
        self._numbers[Slot.TEXT_BYTES] = len(text)


def wait_of(code: int, axes: Sequence[tuple[str, str]]) -> Wait:
    """Decode a `wait_code`, given the name and the ranks (as text) of each axis."""
    operation, axis = divmod(code - 1, AXES_PER_OPERATION)
    if axis >= len(axes):
        return Wait(OPERATIONS[operation], "an axis", None)
    name, ranks = axes[axis]
    return Wait(OPERATIONS[operation], name, _ranks(ranks))


def _ranks(text: str) -> tuple[int, ...] | None:
    if ":" in text:
        return tuple(range(*map(int, text.split(":"))))
    return tuple(map(int, text.split(","))) if text else None


def _text_of(ranks: Sequence[int]) -> str:
    """Write ranks as text: `first:end:distance` if evenly spaced, a list if they are few, else nothing."""
    distance = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    spaced = range(ranks[0], ranks[0] + distance * len(ranks), distance or 1)
    if list(spaced) == list(ranks):
        return f"{spaced.start}:{spaced.stop}:{spaced.step}"
    return ",".join(map(str, ranks)) if len(ranks) <= _MOST_LISTED_RANKS else ""

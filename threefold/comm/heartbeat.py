"""Heartbeats: notes of what a rank is doing, which the loop and the collectives write and compute nothing with.

The heartbeat here keeps no note. The room that watches ranks has one that other processes can read
(`resilience.heartbeat`), which `new_heartbeat` makes.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Final

from threefold.doors import call_hook

OPERATIONS: Final = (
    *("all_reduce", "all_reduce_max", "all_gather", "reduce_scatter", "all_to_all"),
    *("send", "receive", "broadcast", "gather", "barrier"),
)
"""Collectives that a rank can wait in."""
AXES_PER_OPERATION: Final = 256


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


class Heartbeat:
    """Receiver of notes of what this rank does; only the training thread calls its methods."""

    def section(self, section: RunSection, step: int = 0) -> None:
        """Begin a part of the run; the first step is 1."""

    def activity(self, activity: Activity, stage: int = 0, micro_batch: int = 0) -> None:
        """Begin another activity within the section, which ends a wait."""

    def callback(self, name: str, alone: bool = False) -> None:
        """Begin a method of a callback; `alone` if only this rank has the callback."""

    def progress(self) -> None:
        """Note progress within an activity, such as another tensor of a checkpoint."""

    def axis(self, name: str, ranks: Sequence[int]) -> int:
        """Add an axis whose collectives this rank will wait in; return its number for `wait_code`."""
        return 0

    def wait(self, code: int) -> None:
        """Begin to wait in a collective, given its `wait_code`."""

    def resume(self) -> None:
        """End the wait in a collective, if there is one."""

    def waiting(self, code: int) -> AbstractContextManager[None]:
        """Note that this rank waits during a block; afterwards restore the wait around it."""
        return nullcontext()

    def working(self) -> AbstractContextManager[None]:
        """Note that this rank works during a block within a wait, such as a call from another library's collective."""
        return nullcontext()


def new_heartbeat() -> Heartbeat:
    """Return the heartbeat of the room that watches ranks, or one that keeps no note."""
    made: Heartbeat = call_hook("heartbeat") or Heartbeat()
    return made


def wait_code(operation: str, axis: int) -> int:
    """Encode one of `OPERATIONS` on an axis, given its number from `Heartbeat.axis`, for `Heartbeat.wait`."""
    return 1 + axis + AXES_PER_OPERATION * OPERATIONS.index(operation)

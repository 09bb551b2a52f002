"""State of a rank, as its heartbeat writes it into a page of memory: the format of the page, and its reading.

The page holds a few integers: a count that grows with all progress, another one that a thread increments, which
distinguishes a stopped process from a waiting one, the rank's position, and the collective that it waits in. The names
of axes and callbacks follow as JSON.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

PAGE_BYTES: Final = 4096
HEADER_BYTES: Final = 128
STAGE_BITS, MICRO_BATCH_BITS = 8, 24
_MOST_LISTED_RANKS = 64
OPERATIONS: Final = (
    *("all_reduce", "all_reduce_max", "all_gather", "reduce_scatter", "all_to_all"),
    *("send", "receive", "broadcast", "gather", "barrier"),
)
"""Collectives that a rank can wait in."""
AXES_PER_OPERATION = 256


class Slot:
    """Positions of the integers in a page."""

    BEATS, PROGRESS, SECTION, STEP, ACTIVITY, WAIT, WAITED, TEXT_BYTES, ASKED, ANSWERED = range(10)
    WORKED, ASIDE, MEMORY = 10, 11, 12


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
    """State of a rank, as read from its page; steps count from 1, stages and micro-batches from 0."""

    beats: int = 0  # count of the heartbeat thread; does not grow while the process is stopped
    progress: int = 0  # count that grows whenever the rank begins or ends something
    section: RunSection = RunSection.NOTHING
    step: int = 0
    activity: Activity = Activity.NOTHING
    stage: int = 0
    micro_batch: int = 0
    wait: Wait | None = None
    waited: float = 0.0  # seconds in collectives, excluding the current one
    aside: float = 0.0  # seconds, without waits, of work that ranks do not share evenly: saves, callbacks of one rank
    worked: float = 0.0  # seconds in which the process had work for a processor, as its heartbeat thread reported
    name: str = ""  # of the callback that is running
    process: str = ""
    answered: bool = False  # whether the rank has done the work requested with `ask`
    memory: int = 0  # peak in bytes; 0 if not reported

    def __str__(self) -> str:
        """Describe the state, such as `in the forward pass of micro-batch 3 in stage 1 in step 7`."""
        values = {"step": self.step, "stage": self.stage, "micro_batch": self.micro_batch, "name": self.name}
        parts = [_ACTIVITIES.get(self.activity, ""), _SECTIONS[self.section]]
        return " ".join(part.format(**values) for part in parts if part)


Page = memoryview
"""`PAGE_BYTES` writable bytes."""


def ask(page: Page) -> None:
    """Request the page owner's heartbeat thread to do its work and `answer`."""
    page[:HEADER_BYTES].cast("q")[Slot.ASKED] = 1


def read(page: Page | bytes) -> RankState:
    """Read the state of a rank from its page."""
    numbers = memoryview(page)[:HEADER_BYTES].cast("q")
    activity, wait = numbers[Slot.ACTIVITY], numbers[Slot.WAIT]
    text = bytes(page[HEADER_BYTES : HEADER_BYTES + numbers[Slot.TEXT_BYTES]])
    try:
        known = json.loads(text)
    except ValueError:  # nothing there yet, or just being written
        known = {"process": "", "names": [], "axes": []}
    stage, kind, names = activity >> STAGE_BITS & 0xFFFF, Activity(activity & 0xFF), known["names"]
    return RankState(
        beats=numbers[Slot.BEATS],
        progress=numbers[Slot.PROGRESS],
        section=RunSection(numbers[Slot.SECTION]),
        step=numbers[Slot.STEP],
        activity=kind,
        stage=stage,
        micro_batch=activity >> MICRO_BATCH_BITS,
        wait=wait_of(wait, known["axes"]) if wait else None,
        waited=numbers[Slot.WAITED] / 1e9,
        aside=numbers[Slot.ASIDE] / 1e9,
        worked=numbers[Slot.WORKED] / 1e9,
        name=names[stage] if kind is Activity.CALLBACK and stage < len(names) else "",
        process=known["process"],
        answered=bool(numbers[Slot.ANSWERED]),
        memory=numbers[Slot.MEMORY],
    )


def wait_of(code: int, axes: Sequence[tuple[str, str]]) -> Wait:
    """Decode a `wait_code`, given the name and the ranks (as text) of each axis."""
    operation, axis = divmod(code - 1, AXES_PER_OPERATION)
    if axis >= len(axes):
        return Wait(OPERATIONS[operation], "an axis", None)
    name, ranks = axes[axis]
    return Wait(OPERATIONS[operation], name, _ranks(ranks))


def text_of_ranks(ranks: Sequence[int]) -> str:
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

"""State of a rank, as read from the page of its heartbeat (`resilience.heartbeat`), and how its watch writes there."""

import json
from dataclasses import dataclass
from typing import Final

from threefold.comm.heartbeat import Activity, RunSection
from threefold.resilience.heartbeat import (
    HEADER_BYTES,
    MICRO_BATCH_BITS,
    STAGE_BITS,
    Page,
    PageHeartbeat,
    Slot,
    Wait,
    wait_of,
)

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


class WatchedHeartbeat(PageHeartbeat):
    """Heartbeat of a rank that is watched; a thread beside training calls what this class adds."""

    def identify(self, process: str) -> None:
        """Publish an identifier of this process."""
        self._process = process
        self._write_text()

    def beat(self, worked: float = 0.0) -> None:
        """Report that the process is running, and has had work for a processor for `worked` seconds in total."""
        self._numbers[Slot.WORKED] = int(worked * 1e9)
        self._numbers[Slot.BEATS] += 1

    @property
    def is_asked(self) -> bool:
        """Whether a reader of the page has requested work of the heartbeat thread that is not done yet."""
        return bool(self._numbers[Slot.ASKED] and not self._numbers[Slot.ANSWERED])

    def answer(self) -> None:
        """Report that the requested work is done."""
        self._numbers[Slot.ANSWERED] = 1

"""What a rank did when, in a few steps: named ranges of the profiler's trace, and spans for a timeline."""

import threading
import time
from typing import Any, Final, NamedTuple

import torch
from torch.profiler import record_function

from threefold.comm.heartbeat import Activity, RunSection

_ACTION_KINDS: Final = {
    Activity.FORWARD: "F",
    Activity.BACKWARD: "B",
    Activity.INPUT_GRADIENTS: "I",
    Activity.WEIGHT_GRADIENTS: "W",
}
_NAMES: Final = {
    Activity.DATA: "data",
    Activity.PIPELINE: "pipeline exchange",
    Activity.GRADIENT_SUM: "gradient sum",
    Activity.UPDATE: "update",
    Activity.MODEL: "model",
    Activity.RESTORE: "restore",
}
_SECTIONS: Final = {RunSection.STEP: "step", RunSection.EVALUATION: "evaluation", RunSection.SAVE: "save"}


class Span(NamedTuple):
    """Something that a rank did without a pause.

    Attributes:
        name: as in the trace, such as `0F2`, `update` or `callback Summary`.
        kind: `F`, `B`, `I` or `W` of a pipeline's action; else empty.
        stage, micro_batch: of an action.
        step: 1 for the first.
        start, end: seconds since the epoch.
    """

    name: str
    kind: str
    stage: int
    micro_batch: int
    step: int
    start: float
    end: float


class _DeviceClock:
    """Moments of the device that computes, which on a GPU are noted in its stream, without waiting for it.

    Args:
        device: of the rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            torch.cuda.synchronize(device)
        self._base, self._epoch = self.now(), time.time()

    def now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: Any) -> float:
        """Since the epoch; on a GPU only after what was noted has passed."""
        since = self._base.elapsed_time(moment) / 1e3 if self._on_gpu else moment - self._base
        return float(self._epoch + since)


class SpanRecorder:
    """Observes a heartbeat between `start` and `stop`.

    Args:
        device: of the rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock: _DeviceClock | None = None
        self._taken: list[tuple[tuple[str, str, int, int, int], Any, Any]] = []
        self._activity: tuple[str, str, int, int, Any, record_function] | None = None
        self._wait: tuple[int, record_function] | None = None
        self._section: record_function | None = None
        self._step = 0

    def start(self, step: int) -> None:
        """Record from now on, first what follows `step`."""
        self._clock, self._step = _DeviceClock(self._device), step

    def stop(self) -> list[Span]:
        """End, and return what was recorded, in order; waits for a GPU."""
        self._end_section()
        clock, self._clock = self._clock, None
        if clock is None:
            return []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        taken, self._taken = self._taken, []
        return [Span(*what, clock.seconds(start), clock.seconds(end)) for what, start, end in taken]

    # -- told by the heartbeat -----------------------------------------------------------------------------------------

    def section(self, section: RunSection, step: int) -> None:
        self._end_section()
        self._step = step
        if self._clock is not None and section in _SECTIONS:
            self._section = _begun(f"{_SECTIONS[section]} {step}")

    def activity(self, activity: Activity, stage: int, micro_batch: int, name: str) -> None:
        self._end_activity()
        if self._clock is None or activity is Activity.NOTHING:
            return
        if kind := _ACTION_KINDS.get(activity, ""):
            name = f"{stage}{kind}{micro_batch}"
        else:
            name = f"callback {name}" if activity is Activity.CALLBACK else _NAMES.get(activity, activity.name.lower())
            stage = micro_batch = 0
        self._activity = name, kind, stage, micro_batch, self._clock.now(), _begun(name)

    def wait(self, operation: str, axis: str) -> None:
        self.resume()
        if self._clock is not None:
            self._wait = threading.get_ident(), _begun(f"{operation} over {axis}")

    def resume(self) -> None:
        if self._wait is not None:
            (thread, named), self._wait = self._wait, None
            if thread == threading.get_ident():  # a range ends in the thread in which it began
                named.__exit__(None, None, None)

    def _end_activity(self) -> None:
        self.resume()
        if self._activity is None:
            return
        (name, kind, stage, micro_batch, start, named), self._activity = self._activity, None
        named.__exit__(None, None, None)
        if self._clock is not None:
            what = name, kind, stage, micro_batch, self._step
            self._taken.append((what, start, self._clock.now()))

    def _end_section(self) -> None:
        self._end_activity()
        if self._section is not None:
            self._section.__exit__(None, None, None)
            self._section = None


def _begun(name: str) -> record_function:
    named = record_function(name)
    named.__enter__()
    return named

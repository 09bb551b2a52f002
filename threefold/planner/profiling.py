"""Profiles of some steps of a run: a trace of each rank, a timeline of the pipeline stages, and their memory."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple, cast

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from threefold.comm.heartbeat import Activity, Heartbeat, RunSection
from threefold.errors import UserError
from threefold.foreign import nofollow_file, nofollow_folder, write_nofollow
from threefold.planner.memory_profile import ActivityMemory, MemoryRecorder, print_memory, report
from threefold.planner.pictures import draw_run_timeline
from threefold.resilience.heartbeat import PageHeartbeat, Wait, wait_of
from threefold.torch_private.runtime import quieten_kineto
from threefold.train.attachment import Profiler
from threefold.train.callbacks.base import RunContext, reason_of, say
from threefold.train.callbacks.records import StepRecord
from threefold.train.step import Engine

_ACTION_KINDS: Final = {
    Activity.FORWARD: "F",
    Activity.BACKWARD: "B",
    Activity.INPUT_GRADIENTS: "I",
    Activity.WEIGHT_GRADIENTS: "W",
}
_RECORDED: Final = (RunSection.STEP, RunSection.EVALUATION, RunSection.SAVE)


class Span(NamedTuple):
    """Uninterrupted activity of a rank.

    `kind` is `F`, `B`, `I` or `W` for a pipeline action of a stage and a micro-batch; otherwise empty, and the name is
    such as `update` or `callback Summary`. Times are seconds since the epoch.
    """

    name: str
    kind: str
    stage: int
    micro_batch: int
    step: int
    start: float
    end: float


class SpanRecorder:
    """Recorder of a heartbeat's activities between `start` and `stop`; on a GPU by events, without waiting for them.

    Args:
        memory: recorder of their memory; it gets each activity's name.
    """

    def __init__(self, device: torch.device, memory: MemoryRecorder | None = None) -> None:
        self._memory = memory
        self._device, self._on_gpu = device, device.type == "cuda"
        self._base: tuple[Any, float] | None = None  # the same moment by `_now` and by `time.time`, while recording
        self._taken: list[tuple[tuple[str, str, int, int, int], Any, Any]] = []
        self._activity: tuple[tuple[str, str, int, int, int], Any, record_function] | None = None
        self._wait: tuple[int, record_function] | None = None
        self._section: record_function | None = None
        self._step = 0

    def start(self, step: int) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        self._base, self._step = (self._now(), time.time()), step

    def stop(self) -> list[Span]:
        """Stop recording and return the spans in order; waits for a GPU."""
        self._end_section()
        if self._base is None:
            return []
        (base, epoch), self._base = self._base, None
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        taken, self._taken = self._taken, []

        def seconds(moment: Any) -> float:
            return float(epoch + (base.elapsed_time(moment) / 1e3 if self._on_gpu else moment - base))

        return [Span(*what, seconds(start), seconds(end)) for what, start, end in taken]

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    # -- called by the heartbeat ---------------------------------------------------------------------------------------

    def section(self, section: RunSection, step: int) -> None:
        self._end_section()
        self._step = step
        if self._base is not None and section in _RECORDED:
            self._section = _begun(f"{section.name.lower()} {step}")

    def activity(self, activity: Activity, stage: int, micro_batch: int, name: str) -> None:
        self._end_activity()
        if activity is Activity.NOTHING:
            return
        if kind := _ACTION_KINDS.get(activity, ""):
            name = f"{stage}{kind}{micro_batch}"
        else:
            suffix = {Activity.CALLBACK: f" {name}", Activity.PIPELINE: " exchange"}.get(activity, "")
            name, stage, micro_batch = activity.name.lower().replace("_", " ") + suffix, 0, 0
        if self._memory is not None:
            self._memory.activity(name)
        if self._base is None:
            return
        self._activity = (name, kind, stage, micro_batch, self._step), self._now(), _begun(name)

    def wait(self, operation: str, axis: str) -> None:
        self.resume()
        if self._base is not None:
            self._wait = threading.get_ident(), _begun(f"{operation} over {axis}")

    def resume(self) -> None:
        if self._wait is not None:
            (thread, named), self._wait = self._wait, None
            if thread == threading.get_ident():  # a range must end in the thread that began it
                named.__exit__(None, None, None)

    def _end_activity(self) -> None:
        self.resume()
        if self._activity is None:
            return
        (what, start, named), self._activity = self._activity, None
        named.__exit__(None, None, None)
        if self._base is not None:
            self._taken.append((what, start, self._now()))

    def _end_section(self) -> None:
        self._end_activity()
        if self._section is not None:
            self._section.__exit__(None, None, None)
            self._section = None


def _begun(name: str) -> record_function:
    named = record_function(name)
    named.__enter__()
    return named


FOLDER: Final = "profile"
SPANS_FILE: Final = "spans.json"
WARM_UP: Final = 2  # steps before the profiled ones, as the first steps allocate memory and choose kernels
_COMPRESSED_FROM: Final = 64  # number of ranks at and above which traces are compressed, as they may take gigabytes


class ObservedHeartbeat(PageHeartbeat):
    """Heartbeat that replaces another one, writes to its page, and notifies an observer in the writing thread.

    A separate class, so that heartbeats without an observer are not slowed down. The observer has the methods
    `section(section, step)`, `activity(activity, stage, micro_batch, name)`, `wait(operation, axis)` and `resume()`;
    each of the first three ends what the last call of it began, and a section ends the current activity.
    """

    def __init__(self, heartbeat: PageHeartbeat, observer: SpanRecorder) -> None:
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


class StepProfiler(Profiler):
    """Profile some steps of this rank with torch's profiler, after the warm-up, in whose last step memory is counted.

    The numerical results of the run are unchanged; profiling adds one barrier and one gather of times.

    Args:
        draw: draws a file of spans and returns the paths of the pictures, on the first rank.
    """

    ranks: ClassVar[Literal["first", "all"]] = "all"

    def __init__(self, steps: int, draw: Callable[[Path, str], list[Path]] = draw_run_timeline) -> None:
        self._steps, self._draw = steps, draw
        self._begun = self._last_step = 0
        self._profile: profile | None = None
        self._done = False
        self._moments: list[ActivityMemory] = []

    def observing(self, heartbeat: Heartbeat, device: torch.device) -> Heartbeat:
        self._memory = MemoryRecorder()
        self._recorder = SpanRecorder(device, self._memory)
        return ObservedHeartbeat(cast(PageHeartbeat, heartbeat), self._recorder)

    def attach(self, engine: Engine) -> None:
        self._engine = engine

    def setup(self, run: RunContext) -> None:
        self._mesh, self._config, self._end = run.mesh, run.config, run.config.train.max_steps
        self._folder = run.run_dir / FOLDER

    def before_fit(self, start: int) -> None:
        left = self._end - start
        self._begun = start + 1 + max(0, min(WARM_UP, left - self._steps))
        self._last_step = min(self._end, self._begun + self._steps - 1)
        self._counted = 0 if self._begun == start + 1 or self._config.train.compile else self._begun - 1
        if self._begun == start + 1 and left > 0:
            self._start(start)

    def before_step(self, step: int, batch: Any) -> None:
        if step == self._counted:
            self._memory.begin(self._engine)

    def after_step(self, record: StepRecord) -> None:
        if record.step == self._counted:
            self._moments = self._memory.end()
        if self._profile is None and not self._done and record.step == self._begun - 1:
            self._start(record.step)
        elif self._profile is not None and record.step >= self._last_step:
            self._finish(self._profile)

    def after_fit(self) -> None:
        if self._profile is not None:  # a callback ended the run
            self._finish(self._profile)

    def close(self) -> None:
        self._memory.end()
        if self._profile is not None:  # after a signal or a failure, when other ranks may be lost
            self._profile.stop()
            self._recorder.stop()
            with suppress(OSError, RuntimeError):
                self._write_trace(self._profile)
            self._profile = None

    def _start(self, step: int) -> None:
        on_gpu = [ProfilerActivity.CUDA] if self._mesh.device.type == "cuda" else []
        if not on_gpu:  # on a GPU its messages may matter
            quieten_kineto()
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu])
        self._profile.start()
        self._mesh.world.barrier()  # ranks take different times to start profiling
        self._recorder.start(step)

    def _finish(self, profiled: profile) -> None:
        self._profile, self._done = None, True
        spans = self._recorder.stop()
        profiled.stop()
        problem = ""
        try:
            self._write_trace(profiled)
        except (OSError, RuntimeError) as error:
            problem = reason_of(error) if isinstance(error, OSError) else str(error)
        coordinates = self._mesh.coordinates
        shown = not (coordinates.dp or coordinates.cp or coordinates.tp)  # one rank of each pipeline stage
        gathered = self._mesh.world.gather_objects(
            (coordinates.pp, spans if shown else [], self._moments if shown else [], problem)
        )
        if self._mesh.world.is_first:
            stages = sorted((place, spans) for place, spans, *_ in gathered if spans)
            memory = sorted((place, moments) for place, _, moments, _ in gathered if moments)
            told = next(((rank, problem) for rank, (*_, problem) in enumerate(gathered) if problem), None)
            if told is not None:
                say(f"Warning: the trace of rank {told[0]} cannot be written to {self._folder} ({told[1]}).")
            self._report(stages)
            if memory:
                self._report_memory(memory)

    def _write_trace(self, profiled: profile) -> None:
        nofollow_folder(self._folder)
        self._mesh.heartbeat.progress()
        suffix = ".json.gz" if self._mesh.layout.world_size >= _COMPRESSED_FROM else ".json"
        profiled.add_metadata("rank", str(self._mesh.rank))
        profiled.add_metadata("layout", str(self._mesh.layout))
        profiled.export_chrome_trace(str(nofollow_file(self._folder / f"rank-{self._mesh.rank:04}{suffix}")))

    def _report(self, stages: list[tuple[int, list[Span]]]) -> None:
        path = self._folder / SPANS_FILE
        held = [{"pp_rank": place, "spans": [span._asdict() for span in spans]} for place, spans in stages]
        try:
            nofollow_folder(self._folder)
            content = json.dumps({"layout": str(self._mesh.layout), "ranks": held}) + "\n"
            write_nofollow(path, content)
            pictures = self._draw(path, self._config.model.title)
        except (OSError, UserError) as error:
            say(f"Warning: {path} cannot be written ({reason_of(error)}).")
            return
        drawn = f"; timeline in {' and '.join(map(str, pictures))}" if pictures else ""
        traces = f"traces of all ranks, for https://ui.perfetto.dev, in {self._folder}"
        say(f"Profile of steps {self._begun} to {self._last_step}: {traces}{drawn}")

    def _report_memory(self, stages: list[tuple[int, list[ActivityMemory]]]) -> None:
        try:
            picture, rows = report(self._folder, self._config, self._counted, stages)
        except (OSError, UserError) as error:
            say(
                f"Warning: the memory of step {self._counted} cannot be written to {self._folder} ({reason_of(error)})."
            )
            return
        say(f"Memory of step {self._counted} at its peak, of the first rank of each stage; picture in {picture}")
        print_memory(rows)

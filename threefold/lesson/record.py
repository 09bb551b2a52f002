"""Record of what a rank of a lesson does: its collectives, with the module and the pass that each is of."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

from torch import Tensor, nn

from threefold.comm.axis import Axis, EventRecorder
from threefold.comm.heartbeat import Activity, Heartbeat
from threefold.comm.mesh import Mesh, PlannedAxis
from threefold.lesson.group import GroupCall
from threefold.lesson.lesson import LessonEvent, LessonPass
from threefold.torch_private.tensors import storage_key
from threefold.torch_private.threads import notes_of, notes_of_current_node, sharded_names
from threefold.train.step import Engine

_PHASES: Final = {
    Activity.FORWARD: "forward",
    Activity.BACKWARD: "backward",
    Activity.INPUT_GRADIENTS: "input gradients",
    Activity.WEIGHT_GRADIENTS: "weight gradients",
    Activity.GRADIENT_SUM: "gradient sync",
    Activity.UPDATE: "update",
}
_PASSED: Final = {"forward": "activations", "backward": "gradients", "input gradients": "gradients"}
"""What a stage sends to another after a pass."""
_PACKAGE: Final = Path(__file__).resolve().parents[1]
_MODULE: Final = "threefold module"
"""Key of the name of a module in the metadata of an autograd node."""


@dataclass
class LessonLog:
    """Log that the records of all ranks share.

    Attributes:
        events, passes: all that the ranks did, in the order in which they did it.
        values: whether to keep the tensors.
        on_event: called on the rank at each collective, before it runs.
    """

    values: bool
    on_event: Callable[[LessonEvent], object] | None
    events: list[LessonEvent] = field(default_factory=list)
    passes: list[LessonPass] = field(default_factory=list)


class RankRecord:
    """Record of one rank. It records nothing before `begin`."""

    def __init__(self, rank: int, shared: LessonLog) -> None:
        self.rank, self.shared = rank, shared
        self.phase: tuple[str, int, int] = ("batch", 0, 0)
        self._on = False
        self._order = 0
        self._modules: list[str] = []
        self._gradients: dict[int, list[tuple[str, int]]] = {}
        self._whole_name: Callable[[str], str] = str
        self._unmet: list[LessonEvent] = []
        self._late: list[tuple[GroupCall, Sequence[Tensor]]] | None = None

    def begin(self, engine: Engine) -> None:
        """Record from now on what the engine does."""
        self._whole_name = engine.plan.whole_name
        for entry in engine.optimizer.entries if engine.parallelism.zero is None else ():
            buffer = self._gradients.setdefault(storage_key(entry.gradient), [])
            buffer.append((entry.name, int(entry.gradient.storage_offset())))
        for stage in engine.stages:
            for name, module in stage.named_modules():
                if name:
                    module.register_forward_pre_hook(partial(self._enter, name), prepend=True)
                    module.register_forward_hook(self._leave, always_call=True)
        self._on = True

    def end(self) -> None:
        """Record nothing from now on."""
        self._on = False

    # -- passes and modules ------------------------------------------------------------------------------------------

    def activity(self, activity: Activity, stage: int, micro_batch: int) -> None:
        """Note that another pass begins."""
        phase = _PHASES.get(activity)
        if phase is None or not self._on:
            return
        self.phase = (phase, stage, micro_batch)
        self._modules.clear()
        if activity not in (Activity.GRADIENT_SUM, Activity.UPDATE):
            self.shared.passes.append(LessonPass(self.rank, phase, stage, micro_batch))

    def _enter(self, name: str, _module: nn.Module, _inputs: Any) -> None:
        self._modules.append(name)

    def _leave(self, _module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._modules:
            return
        name = self._modules.pop()
        before = {tensor.grad_fn for tensor in _tensors(inputs) if tensor.grad_fn is not None}
        nodes, seen = [tensor.grad_fn for tensor in _tensors(output)], set(before)
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            notes_of(node).setdefault(_MODULE, name)  # that of the innermost module, which ended first
            nodes += [each for each, _ in node.next_functions]

    def _name_of(self, tensor: Tensor, frame: FrameType | None) -> str:
        if names := sharded_names(frame):
            return _joined([self._whole_name(name) for name in names])
        start = int(tensor.storage_offset())
        inside = range(start, start + tensor.numel())
        if names := [name for name, place in self._gradients.get(storage_key(tensor), []) if place in inside]:
            return _joined(names)
        if self._modules:
            return self._modules[-1]
        named = str(notes_of_current_node().get(_MODULE, ""))
        return named or ("gradients" if self.phase[0] == "gradient sync" else "")

    # -- collectives -------------------------------------------------------------------------------------------------

    def add(self, axis: str, operation: str, tensor: Tensor, parts: int) -> None:
        """Record a collective; `parts` as in `EventRecorder.add`."""
        if not self._on:
            return
        phase, stage, micro_batch = self.phase
        frame = inspect.currentframe()
        self._order += 1
        event = LessonEvent(
            number=len(self.shared.events),
            rank=self.rank,
            order=self._order,
            phase=phase,
            stage=stage,
            micro_batch=micro_batch,
            axis=axis,
            operation=operation,
            module=_PASSED.get(phase, "activations")
            if operation == "send" and axis == "pp"
            else self._name_of(tensor, frame),
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            nbytes=parts * tensor.nbytes,
            source=_source(frame),
        )
        self.shared.events.append(event)
        if self._late is not None:
            (call, given), received = self._late[-1], tensor
            self._fill(event, call, given)
            self._receive(event, [received])
        else:
            self._unmet.append(event)
        if self.shared.on_event is not None:
            self.shared.on_event(event)

    @contextmanager
    def late(self) -> Iterator[None]:
        """Record a collective that is noted in the block after it has run."""
        self._late = []
        try:
            yield
        finally:
            self._late = None

    def met(self, call: GroupCall, given: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], None]:
        """Note that this rank calls a collective of a group; return what takes its results."""
        if self._late is not None:
            self._late.append((call, given))
        elif self._unmet:
            event = self._unmet.pop(0)
            self._fill(event, call, given)
            return partial(self._receive, event)
        return lambda _: None

    def _fill(self, event: LessonEvent, call: GroupCall, given: Sequence[Tensor]) -> None:
        event.ranks, event.call = call.ranks, call.number
        if self.shared.values:
            event.sent = tuple(tensor.detach().clone() for tensor in given)

    def _receive(self, event: LessonEvent, found: Sequence[Tensor]) -> None:
        if self.shared.values and event.operation != "send":
            event.received = tuple(tensor.detach().clone() for tensor in found)


class Recorder(EventRecorder):
    """Recorder of a rank's mesh that also keeps what a lesson shows."""

    def __init__(self, record: RankRecord) -> None:
        super().__init__()
        self.record = record

    def add(self, axis: str, operation: str, tensor: Tensor, parts: int = 1) -> None:
        super().add(axis, operation, tensor, parts)
        self.record.add(axis, operation, tensor, parts)


class Activities(Heartbeat):
    """Heartbeat of a rank, which notes the passes."""

    def __init__(self, record: RankRecord) -> None:
        self._record = record

    def activity(self, activity: Activity, stage: int = 0, micro_batch: int = 0) -> None:
        self._record.activity(activity, stage, micro_batch)


class LessonAxis(Axis):
    """Axis of a lesson."""

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        assert isinstance(self.recorder, Recorder)
        with self.recorder.record.late():  # it is noted when the sizes are known
            return super().all_gather(tensor, dim)


class LessonMesh(Mesh):
    """Mesh of a rank that is a thread."""

    def __init__(self, record: RankRecord, *arguments: Any, **options: Any) -> None:
        self._record = record
        super().__init__(*arguments, shared_memory=False, heartbeat=Activities(record), **options)

    def _make_axes(self, everyone: tuple[int, ...]) -> None:
        self.recorder = Recorder(self._record)
        super()._make_axes(everyone)

    def _axes(self, planned: Sequence[PlannedAxis]) -> list[Axis]:
        return [
            LessonAxis(name, ranks, ranks.index(self.rank), group, self.recorder, device_mesh, self.heartbeat)
            for name, ranks, group, device_mesh in planned
        ]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _joined(names: Sequence[str]) -> str:
    """Return the names of parameters, or the first and the last of many."""
    return ", ".join(names) if len(names) < 3 else f"{names[0]} … {names[-1]} ({len(names)})"


def _source(frame: FrameType | None) -> str:
    """Return the file and line of the package that calls a collective, beyond the mesh's own."""
    found = ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            place = path.relative_to(_PACKAGE)
            found = f"{place}:{frame.f_lineno}"
            if place.parts[0] not in ("comm", "lesson") and place.name != "arithmetic.py":
                return found
        elif found and path.name == "graph.py":  # autograd's backward pass, which calls a function of the mesh's own
            return found
        frame = frame.f_back
    return found

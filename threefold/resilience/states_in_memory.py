"""States of a rank in files in memory, which outlive the rank's process.

    record: step, bytes of the tensors, bytes of the index, checksum of all that
    tensors, each at a multiple of `ALIGNMENT`
    index: JSON with the facts, and name, dtype, shape and offset of each tensor

A process may be killed at any moment, so a state counts only if its checksum is right. The record is invalidated before
anything else of the state changes, and written last.
"""

import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from threefold.checkpoint.folder import newest
from threefold.checkpoint.index import name_of
from threefold.checkpoint.manifest import AnomalyFacts
from threefold.checkpoint.resume import find_warm_start
from threefold.checkpoint.tensors import ALIGNMENT
from threefold.checksums import checksum_of, checksum_of_blocks
from threefold.comm.axis import Axis
from threefold.config import Config
from threefold.data.order import ConsumedSamples, read_by_step
from threefold.files import parse_facts
from threefold.train.callbacks.base import Callback, reason_of, say
from threefold.train.saving import Checkpoints
from threefold.train.state import (
    StartingPoint,
    checkpoint_tensors,
    engine_tensors,
    loss_scale_facts,
    random_states,
    restore_loss_scale,
    restore_random_states,
)
from threefold.train.step import Engine

_RECORD: Final = struct.Struct("<qqq48s")
_START: Final = mmap.PAGESIZE
_INVALID: Final = -1


class StateInMemory:
    """State in the file in memory at `path` (`memory_files`); an empty file holds none."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map: mmap.mmap | None = None

    def close(self) -> None:
        """Close the file; its content stays."""
        self._map = None  # the last tensor that views it unmaps it
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    @property
    def step(self) -> int | None:
        """Number of updates of the state, according to its record; None without a state."""
        found = self._record()
        return found[0] if found else None

    def is_whole(self) -> bool:
        """Return whether the state is complete and unchanged, by its checksum."""
        if (found := self._record()) is None:
            return False
        step, data, index, checksum = found
        fits = min(step, data, index) >= 0 and _START + data + index <= os.fstat(self._descriptor).st_size
        return fits and self._checksum(step, data, index) == checksum

    def facts(self) -> dict[str, Any]:
        return dict(self._index["facts"])

    def write(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Replace the state by `tensors` and `facts` (JSON) after `step` updates; raise an `OSError` without room."""
        places, end = {}, 0
        for name, tensor in tensors.items():
            places[name] = (name_of(tensor.dtype), list(tensor.shape), end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        index = json.dumps({"facts": dict(facts), "tensors": places}).encode()
        size = _START + end + len(index)
        if os.fstat(self._descriptor).st_size < size:
            self._map = None
            os.posix_fallocate(self._descriptor, 0, size)  # fails here instead of with a signal while writing
        held = self._mapped()
        _RECORD.pack_into(held, 0, _INVALID, 0, 0, b"")
        for name, tensor in tensors.items():
            self._place(*places[name]).copy_(tensor)
        held[_START + end : size] = index
        _RECORD.pack_into(held, 0, step, end, len(index), self._checksum(step, end, len(index)))

    def read(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Fill tensors in place from a whole state; return the names of those that it holds.

        Raises:
            ValueError: a tensor of the state is missing here, or has another shape or dtype.
        """
        places = self._index["tensors"]
        for name, (dtype, shape, start) in places.items():
            target = tensors.get(name)
            if target is None or list(target.shape) != shape or name_of(target.dtype) != dtype:
                raise ValueError(f"the state in memory has {name} of shape {shape}, which this rank does not")
            target.copy_(self._place(dtype, shape, start))
        return set(places)

    def discard(self) -> None:
        if self._record() is not None:
            _RECORD.pack_into(self._mapped(), 0, _INVALID, 0, 0, b"")

    def _place(self, dtype: str, shape: list[int], start: int) -> Tensor:
        kind, count = getattr(torch, dtype), torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(self._mapped(), dtype=kind, count=count, offset=_START + start).view(shape)

    @property
    def _index(self) -> Any:
        found = self._record()
        assert found is not None
        _, data, index, _ = found
        return json.loads(self._mapped()[_START + data : _START + data + index])

    def _record(self) -> tuple[int, int, int, bytes] | None:
        if self._map is None and os.fstat(self._descriptor).st_size < _START:
            return None
        step, data, index, checksum = _RECORD.unpack_from(self._mapped())
        return None if step < 0 else (step, data, index, checksum.rstrip(b"\0"))

    def _checksum(self, step: int, data: int, index: int) -> bytes:
        with memoryview(self._mapped()) as held:
            content = held[_START : _START + data + index]
            return checksum_of_blocks((struct.pack("<qqq", step, data, index), content)).encode()

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
        return self._map


class StatesInMemory:
    """States of this rank that earlier attempts kept in memory, one of which the run may resume from.

    A state counts only in the same `layout`, a checksum of the settings that two attempts must share. `states` are
    those whose files can be opened; none when the launcher, which ends this rank too, is gone.
    """

    def __init__(self, files: Sequence[Path], config: Config) -> None:
        self.states: list[StateInMemory] = []
        settings = [config.sections()[name] for name in ("parallel", "model", "precision")]
        self.layout = checksum_of(json.dumps(settings, default=str).encode())
        with suppress(OSError):
            for file in files:
                self.states.append(StateInMemory(file))

    def newest(self, world: Axis) -> int | None:
        """Return the newest step whose state every rank holds whole. Collective over the world if states are kept."""
        if not self.states:
            return None
        mine = {state.step for state in self.states if state.is_whole() and state.facts()["layout"] == self.layout}
        common = set.intersection(*map(set, world.gather_objects(sorted(step for step in mine if step is not None))))
        return max(common, default=None)

    def restore(self, step: int, engine: Engine, run_dir: Path, is_unsaved: bool, lines: list[str]) -> StartingPoint:
        """Fill the engine from the state after `step` updates, which `newest` found whole; `lines` will be printed."""
        config, kept = engine.config, next(state for state in self.states if state.step == step)
        states = random_states(engine)
        filled = kept.read(_locals(engine_tensors(engine) | states))
        engine.optimizer.restored()
        restore_random_states(engine, {name: state for name, state in states.items() if name in filled})
        facts, is_first = kept.facts(), engine.mesh.world.is_first
        blend = tuple((count, owed) for count, owed in facts["blend"])
        restore_loss_scale(engine, facts["loss_scale"], facts["good_steps"])
        anomalies = None if facts["anomalies"] is None else parse_facts(AnomalyFacts, facts["anomalies"])
        carried = (newest(run_dir) or getattr(find_warm_start(config), "checkpoint", None)) if is_first else None
        return StartingPoint(
            step,
            ConsumedSamples(read_by_step(config), step, facts["consumed_samples"], blend),
            lines,
            carried=carried,
            skipped=frozenset(map(Path, facts["passed"])),
            anomalies=anomalies,
            is_unsaved=is_unsaved,
        )


class StateKeeper(Callback):
    """Keep this rank's state in memory before every n-th step.

    The state before step s + 1 is the state after s updates and after the evaluation and checkpoint that were due then.
    A rank makes step s + 1 only together with all others, so no rank is more than one state ahead of another. Of two
    states written in turn, one therefore belongs to a step that every rank has.
    """

    ranks: ClassVar[Literal["first", "all"]] = "all"

    def __init__(self, kept: StatesInMemory, checkpoints: Checkpoints) -> None:
        self._states, self._layout, self._checkpoints = kept.states, kept.layout, checkpoints
        self._every = checkpoints.engine.config.checkpoint.memory_every

    def before_fit(self, start: int) -> None:
        self._discard_after(start)

    def before_step(self, step: int, batch: Any) -> None:
        done, checkpoints, engine = step - 1, self._checkpoints, self._checkpoints.engine
        if not self._states or not done or done % self._every:
            return
        self._discard_after(done)
        if any(state.step == done for state in self._states):  # the run resumed from this state
            return
        scale, good_steps = loss_scale_facts(engine)
        facts = {
            "layout": self._layout,
            "loss_scale": scale,
            "good_steps": good_steps,
            "consumed_samples": checkpoints.contents.loader.consumed.before(done),
            "blend": checkpoints.contents.loader.blend(done),
            "anomalies": asdict(found) if (found := checkpoints.contents.anomalies()) else None,
            "passed": sorted(map(str, checkpoints.skipped)),
        }
        oldest = min(self._states, key=lambda state: -1 if state.step is None else state.step)
        try:
            oldest.write(done, _locals(checkpoint_tensors(engine)), facts)
        except OSError as error:
            for state in self._states:
                state.discard()
            self._states = []
            say(f"Warning: no more states are kept in memory ({reason_of(error)}); restarts use checkpoints.")

    def close(self) -> None:
        for state in self._states:
            state.close()
        self._states = []

    def _discard_after(self, step: int) -> None:
        """Discard states of later steps, which a run that went back does not reproduce."""
        for state in self._states:
            if state.step is not None and state.step > step:
                state.discard()


def _locals(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of each tensor, sharing its memory."""
    with torch.no_grad():
        return {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}

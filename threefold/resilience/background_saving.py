"""Checkpoints that are written while training goes on (`checkpoint.async_save`), into the files of a waiting save."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from threefold.checkpoint.folder import from_first, path_of
from threefold.checkpoint.manifest import Facts
from threefold.checkpoint.save import Written, write_checkpoint
from threefold.checkpoint.tensors import ALIGNMENT, Writer, detached
from threefold.comm.axis import Axis, EventRecorder
from threefold.comm.heartbeat import Heartbeat
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.resilience.heartbeat import PageHeartbeat
from threefold.resilience.work_thread import WorkThread
from threefold.torch_private.tensors import foreach_copy_


def background_axis(world: Axis, heartbeat: Heartbeat) -> Axis:
    """Create an axis of all ranks with its own process group, for a thread that runs beside training.

    Its collectives take CPU tensors, may wait for a day without using a processor, and are not recorded. Collective
    over the world.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(days=1)) if world.size > 1 else None
    return Axis("background", world.ranks, world.index, group, EventRecorder(), heartbeat=heartbeat)


class BackgroundSaver:
    """Background saver of checkpoints, one at a time, bit for bit equal to those of `save_checkpoint`.

    Each rank copies the parts that it has to write into host memory; training continues while a thread writes them. The
    threads of all ranks communicate over a separate process group. Collective over the world.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._world: Axis | None = None
        self._beats = PageHeartbeat()  # of the thread
        self._thread = WorkThread("threefold-saving")
        self._written: Written | None = None
        self._planned: tuple[SavePlan, Metadata] | None = None
        self._planned_for: list[tuple[str, torch.Size, torch.dtype]] = []  # this rank's tensors
        self._memory = torch.empty(0, dtype=torch.uint8)

    def save(self, run_dir: Path, facts: Facts, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> Path:
        """Copy the tensors, start writing and return the future folder; `wait` must have returned the previous save."""
        if self._world is None:
            self._world = background_axis(self._mesh.world, self._beats)
        world, path, held = self._world, path_of(run_dir, facts.step), detached(tensors)
        plan, metadata = self._plan(held)
        copies = self._copied(plan, held)

        def write() -> None:
            failure, begun = None, time.monotonic()
            try:
                write_checkpoint(
                    run_dir, facts, texts, world, lambda folder: _write_parts(plan, metadata, copies, folder, world)
                )
            except UserError as error:
                failure = error
            except Exception as error:  # such as a lost rank, which the training notices by itself
                failure = UserError(f"The checkpoint {path} cannot be written ({type(error).__name__}: {error}).")
            self._written = Written(facts.step, path, time.monotonic() - begun, failure)

        self._thread.do(write)
        return path

    def _plan(self, tensors: dict[str, Tensor]) -> tuple[SavePlan, Metadata]:
        """Return this rank's parts and the metadata, planned anew when a rank's tensors change. Collective."""
        world, now = self._mesh.world, [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        if self._planned is None or any(world.gather_objects(now != self._planned_for)):
            planner = _planner_of(tensors, world.is_first)
            # Every rank computes the same global plan, so no part of it has to be sent.
            plans, metadata = planner.create_global_plan(world.gather_objects(planner.create_local_plan()))
            self._planned = Writer(Path(), Heartbeat()).prepare_global_plan(plans)[world.index], metadata
            self._planned_for = now
        return self._planned

    def _copied(self, plan: SavePlan, tensors: dict[str, Tensor]) -> "_CopiedParts":
        """Copy this rank's parts into host memory, which is allocated once and overwritten by the next copy."""
        planner, parts = _planner_of(tensors, False), dict[MetadataIndex, Tensor]()
        for item in plan.items:
            part = planner.resolve_data(item)
            if not isinstance(part, Tensor):
                raise UserError(f"{item.index.fqn} is not a tensor, and a checkpoint holds nothing else.")
            parts[item.index] = part.detach()
        size = sum(part.nbytes + -part.nbytes % ALIGNMENT for part in parts.values())
        if self._memory.nbytes < size:
            pinned = any(part.is_cuda for part in parts.values())
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        places, begin = dict[MetadataIndex, Tensor](), 0
        for index, part in parts.items():
            held = self._memory[begin : begin + part.nbytes]
            places[index] = held.view(part.dtype).view(part.shape) if part.numel() else torch.empty_like(part)
            begin += part.nbytes + -part.nbytes % ALIGNMENT
        on_host = [index for index, part in parts.items() if not part.is_cuda]
        with torch.no_grad():
            foreach_copy_([places[index] for index in on_host], [parts[index] for index in on_host])
            for index, part in parts.items():
                if part.is_cuda:
                    places[index].copy_(part, non_blocking=True)
        if len(on_host) < len(parts):
            torch.cuda.synchronize()
        return _CopiedParts(places)

    @property
    def is_done(self) -> bool:
        """Whether a checkpoint has been written, or has failed, and `wait` has not returned it yet."""
        return self._written is not None

    def wait(self) -> Written | None:
        """Wait for the save, whose writes count as this rank's progress, and return its outcome once, if any."""
        if self._world is not None:
            with self._mesh.world.waiting("gather"):  # for any rank's thread
                seen = -1
                while not self._thread.wait(0.5):
                    if (done := self._beats.progressed) != seen:
                        seen = done
                        self._mesh.heartbeat.progress()
        written, self._written = self._written, None
        return written

    def then(self, work: Callable[[], None]) -> None:
        """Run `work`, which must not raise, on this rank after the current write."""
        self._thread.do(work)

    def end(self, seconds: float | None = None) -> bool:
        """End the thread after its queued work; wait for at most `seconds` and return whether the work is done."""
        done = self._thread.wait(seconds)
        self._thread.end()
        return done


class _CopiedParts(DefaultSavePlanner):
    """Save planner whose parts are copies in host memory."""

    def __init__(self, tensors: Mapping[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index]


def _planner_of(tensors: dict[str, Tensor], is_first: bool) -> DefaultSavePlanner:
    planner = DefaultSavePlanner()
    planner.set_up_planner(cast(dict[str, Any], tensors), None, is_first)
    return planner


def _write_parts(plan: SavePlan, metadata: Metadata, copies: _CopiedParts, folder: Path, world: Axis) -> None:
    """Write each rank's parts of the tensors, durably; OSError on every rank if one cannot. Collective over `world`."""
    writer = Writer(folder, world.heartbeat)
    written: list[WriteResult] | str
    try:
        written = writer.write_data(plan, copies).wait()
    except Exception as error:  # the other ranks wait for this one's result, whatever happened
        written = " ".join(str(error).split())[:300] or type(error).__name__
    results = world.gather_objects(written)
    for rank, result in enumerate(results):
        if isinstance(result, str):
            raise OSError(f"rank {rank}: {result}")
    from_first(world, lambda: writer.finish(metadata, cast(list[list[WriteResult]], results)))

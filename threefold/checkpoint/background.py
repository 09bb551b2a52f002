"""Background saving: host copies of the state, the thread that writes them, and copies at a remote address."""

import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from threefold.checkpoint.folder import path_of
from threefold.checkpoint.manifest import Facts
from threefold.checkpoint.remote import RemoteCheckpoints
from threefold.checkpoint.save import on_first, write_checkpoint
from threefold.checkpoint.storage import Writer
from threefold.checkpoint.tensors import detached
from threefold.comm.axis import Axis
from threefold.comm.heartbeat import Heartbeat
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.torch_private.tensors import foreach_copy_

_ALIGNMENT: Final = 64
"""Alignment in bytes of each tensor in the host copy."""


@dataclass(frozen=True)
class WriteShare:
    """The parts of a checkpoint that this rank writes, and the metadata of the whole checkpoint."""

    plan: SavePlan
    metadata: dcp.Metadata


class Sharing:
    """Assignment of a checkpoint's parts to ranks, like `save_tensors`; repeated only when a rank's tensors change."""

    def __init__(self, world: Axis) -> None:
        self._world = world
        self._share: WriteShare | None = None
        self._of: list[tuple[str, torch.Size, torch.dtype]] = []

    def share(self, tensors: Mapping[str, Tensor]) -> WriteShare:
        """Return this rank's share of tensors, given as in `save_tensors`. Collective over the world."""
        now = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        if self._share is None or any(self._world.gather_objects(now != self._of)):
            self._share, self._of = self._decided(tensors), now
        return self._share

    def _decided(self, tensors: Mapping[str, Tensor]) -> WriteShare:
        planner = _planner_of(detached(tensors), self._world.is_first)
        # Every rank computes the same global plan, so no part of it has to be sent.
        plans, metadata = planner.create_global_plan(self._world.gather_objects(planner.create_local_plan()))
        mine = Writer(Path(), Heartbeat()).prepare_global_plan(plans)[self._world.index]
        return WriteShare(mine, metadata)


class HostCopy:
    """Host memory for a rank's share, allocated once and reused for every checkpoint."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, share: WriteShare, tensors: Mapping[str, Tensor]) -> "Copies":
        """Copy the tensors of this rank's share into host memory, overwriting the previous copy."""
        planner = _planner_of(detached(tensors), False)
        found = [(item, _resolved(planner, item)) for item in share.plan.items]
        places = self._places([source for _, source in found])
        with torch.no_grad():
            on_host = [(place, source) for place, (_, source) in zip(places, found, strict=True) if not source.is_cuda]
            foreach_copy_([place for place, _ in on_host], [source for _, source in on_host])
            for place, (_, source) in zip(places, found, strict=True):
                if source.is_cuda:
                    place.copy_(source, non_blocking=True)
        if len(on_host) < len(found):
            torch.cuda.synchronize()
        return Copies({item.index: place for (item, _), place in zip(found, places, strict=True)})

    def _places(self, sources: Sequence[Tensor]) -> list[Tensor]:
        sizes = [math.ceil(source.nbytes / _ALIGNMENT) * _ALIGNMENT for source in sources]
        if self._memory.nbytes < sum(sizes):
            pinned = any(source.is_cuda for source in sources)
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        places, begin = [], 0
        for source, size in zip(sources, sizes, strict=True):
            held = self._memory[begin : begin + source.nbytes]
            places.append(held.view(source.dtype).view(source.shape) if source.numel() else torch.empty_like(source))
            begin += size
        return places


class Copies(DefaultSavePlanner):
    """Save planner that takes the tensors of a share from host memory, by the index of their part."""

    def __init__(self, tensors: Mapping[dcp.MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index]


def write_share(share: WriteShare, copies: Copies, folder: Path, world: Axis) -> None:
    """Write the tensors of a checkpoint durably, each rank its share. Collective over `world`.

    Args:
        folder: an empty folder shared by all ranks.
        world: all ranks, on a process group that nothing else uses meanwhile.

    Raises:
        OSError: on every rank, if a rank cannot write.
    """
    writer = Writer(folder, world.heartbeat)
    written: list[WriteResult] | str
    try:
        written = writer.write_data(share.plan, copies).wait()
    except Exception as error:  # the other ranks wait for this one's result, whatever happened
        written = " ".join(str(error).split())[:300] or type(error).__name__
    results = world.gather_objects(written)
    for rank, result in enumerate(results):
        if isinstance(result, str):
            raise OSError(f"rank {rank}: {result}")
    on_first(world, lambda: writer.finish(share.metadata, cast(list[list[WriteResult]], results)))


def _planner_of(tensors: dict[str, Tensor], is_first: bool) -> DefaultSavePlanner:
    planner = DefaultSavePlanner()
    planner.set_up_planner(cast(dict[str, Any], tensors), None, is_first)
    return planner


def _resolved(planner: DefaultSavePlanner, item: WriteItem) -> Tensor:
    found = planner.resolve_data(item)
    if not isinstance(found, Tensor):
        raise UserError(f"{item.index.fqn} is no tensor, and a checkpoint holds nothing else.")
    return found.detach()


_NICENESS: Final = 10
"""Niceness of the thread, so that training goes first when all cores are busy."""
_RELAY_INTERVAL: Final = 0.5
"""Seconds between two looks at the thread's progress."""


class WorkThread:
    """A daemon thread that runs one piece of work after another.

    Threads of `concurrent.futures` are joined when the interpreter exits, which would hang on a thread that waits for a
    lost rank.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left = 0
        self._idle = threading.Condition()

    def do(self, work: Callable[[], None]) -> None:
        """Queue `work`, which must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        with self._idle:
            self._left += 1
        self._work.put(work)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all work is done, at most `seconds`, and return whether it is."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._left, seconds)

    @property
    def is_idle(self) -> bool:
        """Whether all work is done."""
        return not self._left

    def end(self) -> None:
        """Let the thread end after its queued work, without waiting for it."""
        if self._thread is not None:
            self._work.put(None)
            self._thread = None

    def _run(self) -> None:
        if sys.platform == "linux":  # where threads have priorities of their own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (work := self._work.get()) is not None:
            try:
                work()
            finally:
                with self._idle:
                    self._left -= 1
                    self._idle.notify_all()


@dataclass(frozen=True)
class Written:
    """Outcome of a background save, the same on every rank; `failure` is None if the checkpoint is complete."""

    step: int
    path: Path
    seconds: float
    failure: UserError | None


class BackgroundSaver:
    """Background saver of checkpoints, one at a time, bit for bit equal to those of `save_checkpoint`.

    Each rank copies its share of the tensors into host memory, and a thread writes it. The threads of all ranks
    communicate over a process group of their own. Collective over the world.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._sharing, self._copy = mesh, Sharing(mesh.world), HostCopy()
        self._world: Axis | None = None
        self._thread = WorkThread("threefold-saving")
        self._written: Written | None = None

    def save(self, run_dir: Path, facts: Facts, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> Path:
        """Copy the tensors, start writing, and return the future folder; see `save_checkpoint` for the arguments.

        `wait` must have returned the previous checkpoint.
        """
        if self._world is None:
            self._world = self._mesh.background_axis()
        world, share, path = self._world, self._sharing.share(tensors), path_of(run_dir, facts.step)
        copies = self._copy.take(share, tensors)

        def write() -> None:
            failure, begun = None, time.monotonic()
            try:
                write_checkpoint(run_dir, facts, texts, world, lambda folder: write_share(share, copies, folder, world))
            except UserError as error:
                failure = error
            except Exception as error:  # such as a lost rank, which the training notices by itself
                failure = UserError(f"The checkpoint {path} cannot be written ({type(error).__name__}: {error}).")
            self._written = Written(facts.step, path, time.monotonic() - begun, failure)

        self._thread.do(write)
        return path

    @property
    def is_done(self) -> bool:
        """Whether a checkpoint has been written, or has failed, and `wait` has not returned it yet."""
        return self._written is not None

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return not self._thread.is_idle

    def wait(self) -> Written | None:
        """Wait for the checkpoint being written and return its outcome once; None if there is none."""
        if self._world is not None:
            with self._mesh.world.waiting("gather"):  # for any rank's thread
                self._relay_progress(self._world.heartbeat)
        written, self._written = self._written, None
        return written

    def _relay_progress(self, writing: Heartbeat) -> None:
        """Wait for the thread, and report what it writes as progress of this rank."""
        seen = -1
        while not self._thread.wait(_RELAY_INTERVAL):
            if (done := writing.place().progress) != seen:
                seen = done
                self._mesh.heartbeat.progress()

    def then(self, work: Callable[[], None]) -> None:
        """Run `work`, which must not raise, on this rank after the current write."""
        self._thread.do(work)

    def end(self, seconds: float | None = None) -> bool:
        """End the thread after its queued work; wait for at most `seconds` and return whether the work is done."""
        done = self._thread.wait(seconds)
        self._thread.end()
        return done


_LOOK: Final = 0.5
"""Seconds between two looks at the current copy while waiting for it."""


class Mirror:
    """Background copier of a run's checkpoints to a remote address, on one rank.

    A checkpoint still queued when a newer one arrives is skipped, unless it is kept for good.

    Args:
        remote: destination of the copies.
        keep, keep_every: remote retention, as in `superfluous`.
        failed: receives a sentence about each checkpoint that could not be copied.
        copied: called after each checkpoint copied.
    """

    def __init__(
        self,
        remote: RemoteCheckpoints,
        keep: int,
        keep_every: int | None,
        failed: Callable[[str], None],
        copied: Callable[[], None],
    ) -> None:
        self._remote, self._keep, self._keep_every = remote, keep, keep_every
        self._failed, self._copied = failed, copied
        self._thread = WorkThread("threefold-remote")
        self._lock = threading.Lock()
        self._waiting: dict[int, Path] = {}
        self._current: Path | None = None

    @property
    def in_use(self) -> frozenset[Path]:
        """Local folders that are still to be read."""
        with self._lock:
            return frozenset(self._waiting.values()) | ({self._current} if self._current else frozenset())

    def add(self, step: int, folder: Path) -> None:
        """Queue the complete checkpoint of a step for copying."""
        with self._lock:
            if self._keep:
                self._waiting = {old: path for old, path in self._waiting.items() if self._stays(old)}
            self._waiting[step] = folder
        self._thread.do(self._copy_next)

    def remove(self, step: int, progress: Callable[[], None] = lambda: None) -> None:
        """Delete the remote copy of a diverged model's checkpoint, after the current copy.

        `progress` is called meanwhile, as the remote file system has timeouts of its own.
        """
        while not self._thread.wait(_LOOK):
            progress()
        try:
            self._remote.remove(step)
        except UserError as error:
            self._failed(str(error))

    def end(self, seconds: float | None = None) -> None:
        """End the thread after its queued work, waiting at most `seconds` (None for no limit)."""
        self._thread.wait(seconds)
        self._thread.end()

    def _stays(self, step: int) -> bool:
        return self._keep_every is not None and step % self._keep_every == 0

    def _copy_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            step = next(iter(self._waiting))
            self._current = self._waiting.pop(step)
        try:
            self._remote.upload(self._current)
            self._remote.prune(self._keep, self._keep_every, step)
            self._copied()
        except UserError as error:
            self._failed(str(error))
        except Exception as error:  # such as a checkpoint that was deleted meanwhile
            self._failed(f"{self._current} cannot be copied to {self._remote.address}: {error}.")
        finally:
            with self._lock:
                self._current = None

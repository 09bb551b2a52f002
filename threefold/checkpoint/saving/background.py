"""Writing checkpoints in a thread beside the training, which waits only until the state has been copied."""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch import Tensor

from threefold.checkpoint.folder import path_of
from threefold.checkpoint.manifest import Facts
from threefold.checkpoint.save import write_checkpoint
from threefold.checkpoint.saving.share import HostCopy, Sharing, write_share
from threefold.comm.heartbeat import Heartbeat
from threefold.comm.mesh import Axis, Mesh
from threefold.errors import UserError

_NICENESS: Final = 10
"""Of the thread, so that the steps' computation goes first where all cores are busy."""
_RELAY_INTERVAL: Final = 0.5
"""Seconds."""


class WorkThread:
    """A thread that does one piece of work after the other; it does not keep its process from ending.

    `concurrent.futures` waits for its threads when the interpreter ends, where one may wait for a rank that is lost.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left = 0
        self._idle = threading.Condition()

    def do(self, work: Callable[[], None]) -> None:
        """Do `work`, which raises nothing, after what was given before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        with self._idle:
            self._left += 1
        self._work.put(work)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until everything is done, at most so long; returns whether it is."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._left, seconds)

    @property
    def is_idle(self) -> bool:
        """Whether everything is done."""
        return not self._left

    def end(self) -> None:
        """End the thread after what it was given, without waiting for it."""
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
    """What became of a checkpoint that was written in the background, the same on every rank.

    Attributes:
        step: updates made before it.
        path: its folder.
        seconds: that writing it took.
        failure: why it could not be written; None where it is complete.
    """

    step: int
    path: Path
    seconds: float
    failure: UserError | None


class BackgroundSaver:
    """Saves checkpoints that are the same, bit for bit, as those of `save_checkpoint`, one at a time.

    Each rank copies its share of the tensors into host memory that it keeps, and a thread writes it; the ranks' threads
    have a process group of their own. Collective over the world.

    Args:
        mesh: all ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._sharing, self._copy = mesh, Sharing(mesh.world), HostCopy()
        self._world: Axis | None = None
        self._thread = WorkThread("threefold-saving")
        self._written: Written | None = None

    def save(self, run_dir: Path, facts: Facts, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> Path:
        """Copy the tensors, and start to write a checkpoint; the one before must have been received by `wait`.

        Args:
            run_dir, facts, tensors, texts: as of `save_checkpoint`.

        Returns:
            the folder that it will have.
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
            except Exception as error:  # a rank is lost, say: the training hears of it by itself
                failure = UserError(f"The checkpoint {path} cannot be written ({type(error).__name__}: {error}).")
            self._written = Written(facts.step, path, time.monotonic() - begun, failure)

        self._thread.do(write)
        return path

    @property
    def is_done(self) -> bool:
        """Whether a checkpoint has been written, or could not be, that `wait` has not returned yet."""
        return self._written is not None

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return not self._thread.is_idle

    def wait(self) -> Written | None:
        """Wait for the checkpoint that is being written; returns it once, and None where there is none."""
        if self._world is not None:
            with self._mesh.world.waiting("gather"):  # for the threads of the other ranks, or for this one's
                self._relay_progress(self._world.heartbeat)
        written, self._written = self._written, None
        return written

    def _relay_progress(self, writing: Heartbeat) -> None:
        """Wait for the thread; what it writes meanwhile is progress of this rank."""
        seen = -1
        while not self._thread.wait(_RELAY_INTERVAL):
            if (done := writing.place().progress) != seen:
                seen = done
                self._mesh.heartbeat.progress()

    def then(self, work: Callable[[], None]) -> None:
        """Do `work`, which raises nothing, on this rank after what is being written."""
        self._thread.do(work)

    def end(self, seconds: float | None = None) -> bool:
        """End the thread after what it was given, for which it may take so many seconds; None for as many as it takes.

        Returns:
            whether it is done.
        """
        done = self._thread.wait(seconds)
        self._thread.end()
        return done

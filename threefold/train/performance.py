"""Hardware use of a step: FLOP/s, MFU, memory of the ranks, and time spent waiting for other ranks."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from threefold.config import Config
from threefold.host import peak_memory
from threefold.models.block import model_flops_per_token

if TYPE_CHECKING:
    from threefold.comm.mesh import Mesh

_SECONDS_A_RANK: Final = 0.01
"""Seconds per rank between two looks at the ranks' memory: a thousand times what a look takes."""


@dataclass(frozen=True)
class Performance:
    """Hardware use of a step.

    Attributes:
        flops_per_second: model FLOPs (`threefold.models.block`) of the step per second and rank, averaged over the
            ranks; None for a user's own model.
        mfu: share of a rank's peak rate that this is; None if the peak is not known.
        memory: peak memory of this rank in bytes: resident memory of its process on a CPU, memory reserved by torch on
            a GPU.
        largest_memory: peak memory of the rank that uses most, among the ranks that this one hears of.
        largest_rank: number of that rank.
        waited: seconds of the step that this rank waited in collectives; on a GPU, whose collectives run beside the
            Python code, only the seconds that the code waits.
        wall_clock: seconds since the run, or this attempt of it, started.
    """

    flops_per_second: float | None
    mfu: float | None
    memory: int
    largest_memory: int
    largest_rank: int
    waited: float
    wall_clock: float


@dataclass
class MeanRates:
    """Mean FLOP/s and MFU over several steps; `last` is the performance of the newest step."""

    seconds: float = 0.0
    flops: float = 0.0
    peak: float = 0.0
    last: Performance | None = None

    def add(self, seconds: float, step: Performance | None) -> None:
        """Add a step; a step without a performance does not count."""
        if step is None:
            return
        self.last = step
        self.seconds += seconds
        rate = step.flops_per_second or 0.0
        self.flops += rate * seconds
        self.peak += rate / step.mfu * seconds if step.mfu else 0.0

    @property
    def teraflops(self) -> float:
        """Model TFLOP/s per rank; 0 if not known."""
        return self.flops / self.seconds / 1e12 if self.seconds else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization; 0 if not known."""
        return self.flops / self.peak if self.peak else 0.0


class PerformanceMeter:
    """Meter of this rank's steps, without a collective and without waiting for a GPU.

    Every rank notes its memory on its heartbeat's page; the first rank reads the notes of the others now and then.
    """

    def __init__(self, mesh: "Mesh", config: Config, peak_rate: float | None, began: float | None = None) -> None:
        self._mesh, self._heartbeat, self._peak = mesh, mesh.heartbeat, peak_rate
        self._interval = _SECONDS_A_RANK * mesh.layout.world_size
        self._began = time.time() if began is None else began
        length = config.data.sequence_length
        of_token = model_flops_per_token(config.model, length)
        tokens = config.train.global_batch_size * length
        self._flops = None if of_token is None else of_token * tokens / mesh.layout.world_size
        self._waited = self._looked = 0.0
        self._largest, self._largest_rank = 0, mesh.rank

    def before_step(self) -> None:
        """Start measuring a step."""
        self._waited = self._heartbeat.waited

    def after_step(self, seconds: float) -> Performance:
        """Return the performance of a step that took `seconds`; call it on every rank."""
        memory = self._memory()
        self._heartbeat.memory(memory)
        if memory > self._largest:
            self._largest, self._largest_rank = memory, self._mesh.rank
        now = time.monotonic()
        if self._mesh.world.is_first and now - self._looked >= self._interval:
            self._looked = now
            self._look()
        rate = None if self._flops is None else self._flops / seconds
        return Performance(
            flops_per_second=rate,
            mfu=None if rate is None or not self._peak else rate / self._peak,
            memory=memory,
            largest_memory=self._largest,
            largest_rank=self._largest_rank,
            waited=self._heartbeat.waited - self._waited,
            wall_clock=time.time() - self._began,
        )

    def _look(self) -> None:
        for rank, place in enumerate(self._heartbeat.everyone()):
            if place is not None and place.memory > self._largest:
                self._largest, self._largest_rank = place.memory, rank

    def _memory(self) -> int:
        if self._mesh.device.type == "cuda":
            import torch

            return torch.cuda.max_memory_reserved(self._mesh.device)
        return peak_memory()

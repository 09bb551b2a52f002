"""How well a step uses its hardware: FLOP/s and MFU, the memory of the ranks, and the time that ranks wait."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from threefold.config import Config
from threefold.host import peak_memory
from threefold.models.family import model_flops_per_token

if TYPE_CHECKING:
    from threefold.comm.mesh import Mesh

_SECONDS_A_RANK: Final = 0.01
"""Between two looks at what the ranks tell of their memory, for each: a thousand times what it takes."""


@dataclass(frozen=True)
class Performance:
    """How well a step used its hardware.

    Attributes:
        flops_per_second: model FLOPs (`threefold.models.family`) of the step per second and rank, the mean over the
            ranks; None for a model of one's own.
        mfu: the part that this is of the peak rate of a rank; None where that is not known.
        memory: bytes that this rank has taken so far at most: resident ones of its process on a CPU, those that torch
            has reserved of the memory of a GPU.
        largest_memory: those of the rank that takes most, of the ranks that this one hears of.
        largest_rank: that rank.
        waited: seconds of the step in which this rank waited in collectives; on a GPU, whose collectives run beside the
            Python code, only those in which that waits.
        wall_clock: seconds since the run, or this attempt of it, was started.
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
    """The rates over several steps.

    Attributes:
        seconds: of the steps.
        flops: that they computed.
        peak: what they could have computed; 0 where that is not known.
        last: of the newest step; None before the first.
    """

    seconds: float = 0.0
    flops: float = 0.0
    peak: float = 0.0
    last: Performance | None = None

    def add(self, seconds: float, step: Performance | None) -> None:
        """Count a step; one without a performance does not count."""
        if step is None:
            return
        self.last = step
        self.seconds += seconds
        rate = step.flops_per_second or 0.0
        self.flops += rate * seconds
        self.peak += rate / step.mfu * seconds if step.mfu else 0.0

    @property
    def teraflops(self) -> float:
        """Model TFLOP/s of each rank; 0 where they are not known."""
        return self.flops / self.seconds / 1e12 if self.seconds else 0.0

    @property
    def mfu(self) -> float:
        """0 where it is not known."""
        return self.flops / self.peak if self.peak else 0.0


class PerformanceMeter:
    """Measures each step of this rank, without a collective and without waiting for a GPU.

    Every rank notes its memory on its heartbeat's page; the first rank reads now and then what the others noted.

    Args:
        mesh: of this rank.
        config: resolved.
        peak_rate: as of `RunContext`.
        began: `time.time()` at which the run was started; None for now.
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
        """A step begins."""
        self._waited = self._heartbeat.waited

    def after_step(self, seconds: float) -> Performance:
        """What a step of `seconds` was like; called on every rank."""
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

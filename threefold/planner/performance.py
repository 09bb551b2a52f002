"""Hardware use of a run's steps: model FLOP/s, MFU, memory, and the time waited for other ranks."""

import sys
import time
from functools import cache, partial
from operator import itemgetter
from typing import Final, cast

import torch

from threefold.config.by_step import value_at
from threefold.planner.model_size import flops_per_token
from threefold.resilience.heartbeat import PageHeartbeat
from threefold.train.callbacks.base import RunContext
from threefold.train.callbacks.records import Performance

_SECONDS_A_RANK: Final = 0.01
"""Seconds per rank between two looks at the ranks' memory: a thousand times what a look takes."""


class PerformanceMeter:
    """Meter of this rank's steps, without a collective and without waiting for a GPU.

    Every rank notes its memory on its heartbeat's page; the first rank reads the notes of the others now and then.
    """

    def __init__(self, run: RunContext) -> None:
        mesh, config, self._peak, self._began = run.mesh, run.config, run.peak_rate, run.attempt.began
        self._mesh, self._heartbeat = mesh, cast(PageHeartbeat, mesh.heartbeat)
        self._config, self._ranks = config, mesh.layout.world_size
        self._of_token = cache(partial(flops_per_token, config))
        self._waited = self._looked = 0.0
        self._largest = 0, mesh.rank  # memory, and the first rank that had it

    def before_step(self) -> None:
        self._waited = self._heartbeat.waited

    def after_step(self, step: int, seconds: float) -> Performance:
        """Return the performance of `step`, from 1, which took `seconds`; call it on every rank."""
        on_gpu, now = self._mesh.device.type == "cuda", time.monotonic()
        memory = torch.cuda.max_memory_reserved(self._mesh.device) if on_gpu else peak_memory()
        self._heartbeat.memory(memory)
        known = [self._largest, (memory, self._mesh.rank)]
        if self._ranks > 1 and self._mesh.world.is_first and now - self._looked >= _SECONDS_A_RANK * self._ranks:
            self._looked, places = now, enumerate(self._heartbeat.everyone())
            known += [(place.memory, rank) for rank, place in places if place is not None]
        self._largest = max(known, key=itemgetter(0))
        length = value_at(self._config.data.sequence_length, step - 1)
        tokens = value_at(self._config.train.global_batch_size, step - 1) * length
        of_token = self._of_token(length)
        rate = None if of_token is None else of_token * tokens / self._ranks / seconds
        return Performance(
            flops_per_second=rate,
            mfu=None if rate is None or not self._peak else rate / self._peak,
            memory=memory,
            largest_memory=self._largest[0],
            largest_rank=self._largest[1],
            waited=self._heartbeat.waited - self._waited,
            wall_clock=time.time() - self._began,
        )


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes, or 0 if unknown."""
    try:
        import resource
    except ImportError:  # not a Unix
        return 0
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024

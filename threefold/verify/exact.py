"""Verification of exact runs: every layout inside the grain has the bits of one process."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from threefold.comm.layout import Layout, LayoutSpec
from threefold.config import Config
from threefold.errors import UserError
from threefold.launch.worker_pool import WorkerError, WorkerPool
from threefold.models.source import ConfigSource, ModelSource
from threefold.parallel.plan_check import check_source
from threefold.verify.batches import BatchSource
from threefold.verify.exact_rank import ORDER, Difference, ExactReport, run_exact_rank, write_exact_trace
from threefold.verify.layouts import compose
from threefold.verify.reference import Trace
from threefold.verify.verifier import DEPARTS, EQUAL, FAILED, PATIENCE, Verdict, told


@dataclass(frozen=True)
class ExactVerification:
    """Task of a verification of bits.

    Attributes:
        config: exact config of the single process.
    """

    config: Config
    steps: int
    rows: BatchSource
    source: ModelSource = field(default_factory=ConfigSource)


@dataclass(frozen=True)
class ExactResult:
    """Result of comparing the bits of a layout with those of one process.

    Attributes:
        label: the layout, or the number of threads of one process.
        verdict: `equal`, `departs` or `error` (did not run to the end).
        seconds: wall-clock time.
        fingerprint: fingerprint of the weights after the last step; empty if the run failed.
        first: first difference: the earliest step, then the earliest of initial weights, gradients, loss, norm, weights
            and their fingerprint, then the first parameter in the order of the model, and the lowest rank.
        ranks: ranks that have this difference.
        message: message of an error.
        details: traceback of an error.
    """

    label: str
    verdict: Verdict
    seconds: float
    fingerprint: str = ""
    first: Difference | None = None
    ranks: tuple[int, ...] = ()
    message: str = ""
    details: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {
            "layout": self.label,
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
            "fingerprint": self.fingerprint or None,
            "first_departure": self.first and asdict(self.first),
            "ranks": list(self.ranks),
            "message": self.message,
        }


class ExactVerifier:
    """Comparison of bits with the single process, layout by layout, on a worker pool.

    Attributes:
        fingerprints: fingerprints of the single process after each step, the initial one first, once
            `run_one_process` has returned.
        parameters: number of elements of the model's parameters.
        unknown_calls: functions that a user's own model calls and that are not known to be exact.
    """

    def __init__(self, task: ExactVerification, pool: WorkerPool, folder: Path) -> None:
        self.task, self.pool, self.folder = task, pool, folder
        self.fingerprints: list[str] = []
        self.unknown_calls: list[str] = []
        self.parameters = 0
        self._places: dict[str, int] = {}

    def run_one_process(self) -> None:
        """Check the model, and train it in one process; raises like `Verifier.run_one_process`."""
        task, alone = self.task, compose(self.task.config, LayoutSpec(Layout()))
        try:
            self.pool.run(1, check_source, task.source, alone)
            [report] = self.pool.run(1, write_exact_trace, task.source, alone, task.rows, task.steps, str(self.folder))
        except WorkerError as error:
            if isinstance(error.error, UserError):
                raise error.error from None
            raise
        self._places = {name: place for place, name in enumerate(report.names)}
        self.fingerprints, self.unknown_calls = report.fingerprints, report.unknown_calls
        self.parameters = sum(prod(weight.shape) for weight in Trace.load(self.folder).initial.values())

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the single process after its last step."""
        return self.fingerprints[-1]

    def verify(self, spec: LayoutSpec) -> ExactResult:
        """Train in a layout, and compare its bits."""
        return self._result(str(spec), spec, None)

    def verify_threads(self, threads: int) -> ExactResult:
        """Train in one process with a number of threads, and compare its bits."""
        label = f"1 process, {threads} {'thread' if threads == 1 else 'threads'}"
        return self._result(label, LayoutSpec(Layout()), threads)

    def _result(self, label: str, spec: LayoutSpec, threads: int | None) -> ExactResult:
        task, started = self.task, time.perf_counter()
        arguments = task.source, compose(task.config, spec), task.rows, task.steps, str(self.folder)
        try:
            reports: list[ExactReport] = self.pool.run(
                spec.world_size, run_exact_rank, *arguments, self.fingerprints, threads
            )
        except WorkerError as error:
            seconds = time.perf_counter() - started
            return ExactResult(label, FAILED, seconds, message=told(error), details=str(error))
        seconds, mine = time.perf_counter() - started, reports[0].fingerprints[-1]
        found = [difference for report in reports for difference in report.differences]
        if not found:
            return ExactResult(label, EQUAL, seconds, mine)

        def time_of(difference: Difference) -> tuple[int, ...]:
            place = self._places.get(difference.parameter, -1)
            return difference.step, ORDER.index(difference.what), place, difference.rank

        first = min(found, key=time_of)
        ranks = (each.rank for each in found if time_of(each)[:3] == time_of(first)[:3])
        return ExactResult(label, DEPARTS, seconds, mine, first, tuple(sorted(ranks)))


@contextmanager
def exact_verifier(task: ExactVerification, ranks: int) -> Iterator[ExactVerifier]:
    """Yield a verifier with workers for up to `ranks` ranks, which end with the block."""
    with (
        WorkerPool(ranks, PATIENCE[False]) as pool,
        tempfile.TemporaryDirectory(prefix="threefold-verify-") as folder,
    ):
        yield ExactVerifier(task, pool, Path(folder))

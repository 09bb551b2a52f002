"""Layouts to verify (given ones, all valid ones, or a selection that covers every feature), and their verification."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path

from threefold.comm.layout import LayoutSpec
from threefold.config import Config
from threefold.data.dataset import names_data, open_dataset
from threefold.errors import UserError
from threefold.launch.worker_pool import WorkerError, WorkerPool
from threefold.models.loss_terms import LossFunction
from threefold.models.source import ConfigSource, ModelSource
from threefold.parallel.plan_check import check_source
from threefold.verify.batches import BatchSource, DataBatches, RandomBatches
from threefold.verify.compare import TOLERANCE, coverage
from threefold.verify.layout_selection import Selection
from threefold.verify.rank_worker import SecondRun, run_rank, write_second_trace
from threefold.verify.reference import Trace, write_trace
from threefold.verify.report import FAILED, LayoutResult, judge
from threefold.verify.shrunk_config import compose, with_further_features

PATIENCE = {True: timedelta(minutes=30), False: timedelta(minutes=2)}
"""Timeout of a collective, full-size and shrunk."""


@dataclass(frozen=True)
class Verification:
    """Task of a verification.

    Attributes:
        config: config of the single process (`shrunk_config.prepare`, and `shrink` unless `full`).
        full: whether the model keeps the full size of the config file; there is no second run then.
        thorough: whether attention drops in the second run too.
    """

    config: Config
    steps: int
    rows: BatchSource
    source: ModelSource = field(default_factory=ConfigSource)
    full: bool = False
    thorough: bool = False

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.config.precision.dtype]

    @cached_property
    def second(self) -> SecondRun | None:
        """The second run; None for a full-size model, for which it would take long."""
        if self.full:
            return None
        own_loss = self.source.loss(self.config) is not None
        config = with_further_features(self.config, self.thorough, documents=not own_loss)
        random = not own_loss and not self.rows.is_nested
        return SecondRun(config, RandomBatches() if random else self.rows, self.steps)


def choose_batches(config: Config, loss: LossFunction | None = None) -> BatchSource:
    """Return batches of the config's data, or random ones if it names none; unmasked for a user's loss."""
    masked = loss is None
    if not names_data(config):
        return RandomBatches(masked)
    nested = open_dataset(config).is_nested
    return DataBatches(config, masked and not nested, nested)


class Verifier:
    """Comparison of layouts with the single process, one after the other, on a worker pool.

    The pool has as many workers as the largest layout has ranks; the folder gets the trace of the single process.

    Attributes:
        shapes: unsharded shape of each parameter, in model order, once `run_one_process` has returned.
    """

    def __init__(self, task: Verification, pool: WorkerPool, folder: Path) -> None:
        self.task, self.pool, self.folder = task, pool, folder
        self.shapes: dict[str, tuple[int, ...]] = {}

    def run_one_process(self) -> None:
        """Check the model, and compute the single-process trace that all layouts are compared with.

        Raises:
            UserError: the model or its sharding plan is wrong, or the data cannot be read.
            WorkerError: the process failed.
        """
        task = self.task
        try:
            self.pool.run(1, check_source, task.source, task.config)
            self.pool.run(1, write_trace, task.source, task.config, task.rows, task.steps, str(self.folder))
            if task.second is not None:
                self.pool.run(1, write_second_trace, task.source, task.second, str(self.folder))
        except WorkerError as error:
            if isinstance(error.error, UserError):
                raise error.error from None
            raise
        self.shapes = {name: tuple(weight.shape) for name, weight in Trace.load(self.folder).initial.items()}

    def verify(self, spec: LayoutSpec, second_run: bool = True) -> LayoutResult:
        """Run one layout, and its second run if asked for, and compare it with the single process."""
        task, started = self.task, time.perf_counter()
        config = compose(task.config, spec)
        try:
            second = None
            if task.second is not None and second_run:
                second = compose(task.second.config, spec), task.second
            reports = self.pool.run(
                spec.world_size, run_rank, task.source, config, task.rows, task.steps, str(self.folder), second
            )
        except WorkerError as error:
            seconds = time.perf_counter() - started
            return LayoutResult(spec, FAILED, seconds, message=_told(error), details=str(error))
        missing = coverage([report.held for report in reports], self.shapes)
        return judge(spec, reports, list(self.shapes), task.tolerance, time.perf_counter() - started, missing)


@contextmanager
def verifier(task: Verification, selection: Selection) -> Iterator[Verifier]:
    """Yield a verifier with workers for a selection, which end with the block."""
    ranks = max((spec.world_size for spec in selection.specs), default=1)
    with (
        WorkerPool(ranks, PATIENCE[task.full]) as pool,
        tempfile.TemporaryDirectory(prefix="threefold-verify-") as folder,
    ):
        yield Verifier(task, pool, Path(folder))


def _told(failure: WorkerError) -> str:
    if failure.error is None:
        return str(failure).strip().splitlines()[0 if "process ended" in str(failure) else -1]
    text = " ".join(str(failure.error).split()) or "no message"
    shown = text if isinstance(failure.error, UserError) else f"{type(failure.error).__name__}: {text}"
    return f"rank {failure.rank} failed: {shown}"

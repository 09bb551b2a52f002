"""Verification of a config: the single process first, then each layout on the same worker pool."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path

from threefold.comm.layout_spec import LayoutSpec
from threefold.config import Config
from threefold.data.dataset import names_data, open_dataset
from threefold.errors import UserError
from threefold.launch.worker_pool import WorkerError, WorkerPool
from threefold.models.loss_terms import LossFunction
from threefold.models.source import ConfigSource, ModelSource
from threefold.parallel.source_check import check_source
from threefold.verify.batches import BatchSource, NestedBatches, RandomBatches, TokenFileBatches
from threefold.verify.compare import TOLERANCE, coverage
from threefold.verify.layout_selection import Selection
from threefold.verify.own_batches import OwnBatches
from threefold.verify.rank_worker import run_rank
from threefold.verify.reference import Trace, write_trace
from threefold.verify.report import FAILED, LayoutResult, judge
from threefold.verify.second_run import SecondRun, write_second_trace
from threefold.verify.shrunk_config import compose, with_further_features

PATIENCE = {True: timedelta(minutes=30), False: timedelta(minutes=2)}
"""Timeout of a collective, full-size and shrunk."""


@dataclass(frozen=True)
class Verification:
    """What is verified.

    Attributes:
        config: of the single process (`shrunk_config.prepare`, and `shrink` unless `full`).
        steps: optimizer steps.
        rows: the batches.
        source: the model.
        full: whether the model has the full size of the config file; there is no second run then.
        thorough: whether attention drops in the second run too.
    """

    config: Config
    steps: int
    rows: BatchSource | OwnBatches
    source: ModelSource = field(default_factory=ConfigSource)
    full: bool = False
    thorough: bool = False

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.config.precision.dtype]

    @cached_property
    def second(self) -> SecondRun | None:
        """The second run; None for a model of full size, for which it would take long."""
        if self.full:
            return None
        own_loss = self.source.loss(self.config) is not None
        config = with_further_features(self.config, self.thorough, documents=not own_loss)
        random = not own_loss and isinstance(self.rows, BatchSource) and not self.rows.is_nested
        return SecondRun(config, RandomBatches() if random else self.rows, self.steps)


def choose_batches(config: Config, loss: LossFunction | None = None) -> BatchSource:
    """Batches of the config's data, or random ones if it names none; for a loss of the user's own, or None."""
    masked = loss is None
    if not names_data(config):
        return RandomBatches(masked)
    return NestedBatches(config) if open_dataset(config).is_nested else TokenFileBatches(config, masked)


class Verifier:
    """Compares layouts with the single process, one after the other, on a worker pool.

    Args:
        task: what to verify.
        pool: with as many workers as the largest layout has ranks.
        folder: for the trace of the single process.
    """

    def __init__(self, task: Verification, pool: WorkerPool, folder: Path) -> None:
        self.task, self.pool, self.folder = task, pool, folder
        self._shapes: dict[str, tuple[int, ...]] = {}

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
        self._shapes = {name: tuple(weight.shape) for name, weight in Trace.load(self.folder).initial.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Unsharded shape of each parameter, in model order."""
        return self._shapes

    def verify(self, spec: LayoutSpec, second_run: bool = True) -> LayoutResult:
        """Run one layout and compare it with the single process.

        Args:
            spec: the layout.
            second_run: whether it makes the second run too.
        """
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
        missing = coverage([report.held for report in reports], self._shapes)
        return judge(spec, reports, list(self._shapes), task.tolerance, time.perf_counter() - started, missing)


@contextmanager
def verifier(task: Verification, selection: Selection) -> Iterator[Verifier]:
    """A verifier with workers for a selection, which end with the block."""
    ranks = max((spec.world_size for spec in selection.specs), default=1)
    with (
        WorkerPool(ranks, PATIENCE[task.full]) as pool,
        tempfile.TemporaryDirectory(prefix="threefold-verify-") as folder,
    ):
        yield Verifier(task, pool, Path(folder))


def _told(failure: WorkerError) -> str:
    """The failure on one line."""
    if failure.error is None:
        return str(failure).strip().splitlines()[0 if "process ended" in str(failure) else -1]
    text = " ".join(str(failure.error).split()) or "no message"
    shown = text if isinstance(failure.error, UserError) else f"{type(failure.error).__name__}: {text}"
    return f"rank {failure.rank} failed: {shown}"

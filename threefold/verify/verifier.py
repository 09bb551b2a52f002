"""Verification of layouts: one process first, then each layout, with a verdict and where it first departs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from math import prod
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Final, Literal

from threefold.comm.layout import LayoutSpec
from threefold.config import Config
from threefold.cpu.scratch import scratch_folder
from threefold.data.dataset import names_data, open_dataset
from threefold.errors import UserError
from threefold.models.loss_terms import LossFunction
from threefold.models.source import ConfigSource, ModelSource
from threefold.parallel.layout_check import check_source
from threefold.verify import compare
from threefold.verify.batches import BatchSource, DataBatches, RandomBatches
from threefold.verify.compare import Error
from threefold.verify.layouts import Selection, compose, with_further_features
from threefold.verify.rank_worker import CHECKS, RankReport, SecondRun, run_rank, write_second_trace
from threefold.verify.reference import RATE, READ, SAMPLES, TOKENS, Trace, write_trace
from threefold.verify.worker_pool import WorkerError, WorkerPool

EQUAL: Final = "equal"
DEPARTS: Final = "departs"
FAILED: Final = "error"
UNSPLIT: Final = "unsplit"
_FIRST = (
    *(compare.INITIAL, compare.CONSUMED, SAMPLES, TOKENS, compare.EVALUATION, compare.EVALUATED, compare.GRADIENT),
    *(compare.LOSS, compare.NORM, compare.CLIPPED, RATE, compare.UPDATES, compare.WEIGHT),
    *(compare.AVERAGE, compare.BUFFER),
    *(compare.SCALE, READ, compare.EXPORTED),
)
_ORDER = ("", *CHECKS)
Verdict = Literal["equal", "departs", "error", "unsplit"]


@dataclass(frozen=True)
class LayoutResult:
    """Result of comparing a layout with a single process.

    Attributes:
        verdict: `equal`, `departs`, `error` (did not run to the end) or `unsplit` (equal, but one of its axes shards
            nothing of the model, so nothing is verified).
        worst: largest relative error of all comparisons; None if the run failed.
        first: first departure: the earliest step, then the earliest of initial weights, samples and tokens, evaluation,
            gradients, loss, norm, clipped gradients, learning rate, count of updates, weights and buffers, then the
            first in model order and the lowest rank.
        nearest_to_loss: if gradients depart while the step's loss is equal, the last of them in model order. The fault
            is there, as the backward pass goes from the last layer to the first.
        departing: names of the parameters that depart in the step of the first departure, in model order.
        sent: axis → largest number of bytes of a rank's tensors in the collectives of one step.
        parameters: largest number of parameter elements that a rank updates.
        message: message of an error, of a departure that is not numerical, or about the axes that shard nothing.
        checks: checks of the second run, each with its largest relative error, in order.
        by_parameter: parameters in model order, each with its largest relative error of all comparisons.
    """

    spec: LayoutSpec
    verdict: Verdict
    seconds: float
    worst: Error | None = None
    first: Error | None = None
    nearest_to_loss: str = ""
    departing: tuple[str, ...] = ()
    sent: tuple[tuple[str, int], ...] = ()
    parameters: int = 0
    message: str = ""
    details: str = ""
    checks: tuple[tuple[str, float], ...] = ()
    by_parameter: tuple[tuple[str, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the result as the JSON object that docs/verify.md describes."""
        layout = self.spec.layout
        return {
            "layout": str(self.spec),
            "axes": {axis: layout.size(axis) for axis in ("dp", "tp", "pp", "cp", "ep")},
            "settings": dict(self.spec.settings),
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
            "worst": self.worst and asdict(self.worst),
            "first_departure": self.first and asdict(self.first),
            "nearest_to_loss": self.nearest_to_loss,
            "departing_parameters": list(self.departing),
            "bytes_per_step": dict(self.sent),
            "parameters_per_rank": self.parameters,
            "message": self.message,
            "checks": dict(self.checks),
            "worst_by_parameter": dict(self.by_parameter),
        }


def judge(
    spec: LayoutSpec, reports: list[RankReport], order: list[str], tolerance: float, seconds: float, missing: str | None
) -> LayoutResult:
    """Return the result of a layout from the reports of its ranks.

    `order` lists the parameters in model order; errors up to `tolerance` are equal; `missing` is the result of
    `coverage`.
    """
    number = {name: place for place, name in enumerate(order)}
    places = []
    for report in reports:
        stages = {part.name: part.stage for part in report.held}
        for error in report.errors:
            at = spec.layout.coordinates(error.rank)
            stage = stages.get(error.parameter, at.pp)
            places.append(replace(error, dp=at.dp, tp=at.tp, pp=at.pp, cp=at.cp, stage=stage))
    wrong = [place for place in places if not place.relative <= tolerance]

    def time_of(place: Error) -> tuple[int, ...]:
        order_in_step = _FIRST.index(place.what), number.get(place.parameter, 0), place.rank
        return _ORDER.index(place.check), place.step, *order_in_step

    first = min(wrong, key=time_of, default=None)
    together = [place for place in wrong if first and (place.check, place.step) == (first.check, first.step)]
    departing = {place.parameter for place in together if place.parameter}
    nearest_to_loss = ""
    if first and first.what == compare.GRADIENT and all(place.what != compare.LOSS for place in together):
        gradients = (place.parameter for place in together if place.what == compare.GRADIENT)
        nearest_to_loss = max(gradients, key=lambda name: number.get(name, 0))
    idle = "" if wrong or missing else _nothing_split(spec, reports, order)
    checks = ((check, [place.relative for place in places if place.check == check]) for check in CHECKS)
    axes = sorted({axis for report in reports for axis in report.sent})
    by_parameter: dict[str, float] = {}
    for place in places:
        by_parameter[place.parameter] = max(place.relative, by_parameter.get(place.parameter, 0.0))
    return LayoutResult(
        spec,
        DEPARTS if wrong or missing else UNSPLIT if idle else EQUAL,
        seconds,
        worst=max(places, key=lambda place: place.relative),
        first=first,
        nearest_to_loss=nearest_to_loss,
        departing=tuple(sorted(departing, key=lambda name: number.get(name, 0))),
        sent=tuple((axis, max(report.sent.get(axis, 0) for report in reports)) for axis in axes),
        parameters=max(sum(prod(part.shape) for part in report.held) for report in reports),
        message=missing or idle,
        checks=tuple((check, max(found)) for check, found in checks if found),
        by_parameter=tuple((name, by_parameter[name]) for name in order if name in by_parameter),
    )


def _nothing_split(spec: LayoutSpec, reports: list[RankReport], order: list[str]) -> str:
    """Return a message that names the axes that should shard the model but do not; empty if there are none."""
    layout, cut = spec.layout, {axis for report in reports for axis in report.cut}
    sharing = {
        "tp": layout.tp == 1 or "tp" in cut,
        "ep": layout.ep == 1 or "ep" in cut,
        "pp": layout.pp == 1 or any({part.name for part in report.held} != set(order) for report in reports),
        "zero": not spec.setting("parallel.zero") or bool(cut - {"tp", "ep"}),
    }
    idle = [axis for axis, shared in sharing.items() if not shared]
    return f"nothing is split over {' and '.join(idle)}: every rank of it holds the same parameters" if idle else ""


PATIENCE = {True: timedelta(minutes=30), False: timedelta(minutes=2)}
"""Timeout of a collective, full-size and shrunk."""


@dataclass(frozen=True)
class Verification:
    """Task of a verification.

    Attributes:
        config: config of the single process (`layouts.prepare`, and `shrink` unless `full`; exact for bits).
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
        return compare.TOLERANCE[self.config.precision.dtype]

    @cached_property
    def second(self) -> SecondRun | None:
        """Second run; None for a full-size model, which would take too long to train again."""
        if self.full:
            return None
        custom_loss = self.source.loss(self.config) is not None
        config = with_further_features(self.config, self.thorough, documents=not custom_loss)
        random = not custom_loss and not self.rows.is_nested
        return SecondRun(config, RandomBatches() if random else self.rows, self.steps)


def choose_batches(config: Config, loss: LossFunction | None = None) -> BatchSource:
    """Return batches of the config's data, or random ones if it names none; unmasked for a custom loss.

    Pairs of preferences are random, as those of the data may be longer than verification's samples.
    """
    masked = loss is None
    if config.preference.beta or not names_data(config):
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
        """Check the model, and compute the single-process trace that all layouts are compared with."""
        task = self.task
        with user_errors():
            self.pool.run(1, check_source, task.source, task.config)
            self.pool.run(1, write_trace, task.source, task.config, task.rows, task.steps, str(self.folder))
            if task.second is not None:
                self.pool.run(1, write_second_trace, task.source, task.second, str(self.folder))
        self.shapes = {name: tuple(weight.shape) for name, weight in Trace.load(self.folder).initial.items()}

    def verify(self, spec: LayoutSpec, second_run: bool = True) -> LayoutResult:
        """Run one layout, and its second run if asked for, and compare it with the single process."""
        task, started = self.task, time.perf_counter()
        config, second = compose(task.config, spec), None
        try:
            if task.second is not None and second_run:
                second = compose(task.second.config, spec), task.second
            reports = self.pool.run(
                spec.world_size, run_rank, task.source, config, task.rows, task.steps, str(self.folder), second
            )
        except WorkerError as error:
            seconds = time.perf_counter() - started
            return LayoutResult(spec, FAILED, seconds, message=told(error), details=str(error))
        missing = compare.coverage([report.held for report in reports], self.shapes)
        return judge(spec, reports, list(self.shapes), task.tolerance, time.perf_counter() - started, missing)


@contextmanager
def verifier(task: Verification, selection: Selection) -> Iterator[Verifier]:
    """Yield a verifier with workers for a selection, which end with the block."""
    with workers(max((spec.world_size for spec in selection.specs), default=1), task.full) as (pool, folder):
        yield Verifier(task, pool, folder)


@contextmanager
def workers(ranks: int, full: bool = False) -> Iterator[tuple[WorkerPool, Path]]:
    """Yield workers for up to `ranks` ranks and a folder for traces, which end with the block."""
    with WorkerPool(ranks, PATIENCE[full]) as pool, scratch_folder(gettempdir()) as folder:
        yield pool, folder


@contextmanager
def user_errors() -> Iterator[None]:
    """Raise the `UserError` of a worker in the block as itself, instead of the `WorkerError`."""
    try:
        yield
    except WorkerError as error:
        if isinstance(error.error, UserError):
            raise error.error from None
        raise


def told(failure: WorkerError) -> str:
    """Return the failure of a layout's rank as one line."""
    if failure.error is None:
        return str(failure).strip().splitlines()[0 if "process ended" in str(failure) else -1]
    text = " ".join(str(failure.error).split()) or "no message"
    shown = text if isinstance(failure.error, UserError) else f"{type(failure.error).__name__}: {text}"
    return f"rank {failure.rank} failed: {shown}"

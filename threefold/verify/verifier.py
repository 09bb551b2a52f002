"""Layouts to verify (given ones, all valid ones, or a selection that covers every feature), and their verification."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from itertools import combinations, product
from pathlib import Path
from typing import Any

from threefold.comm.layout import SCHEDULES, Layout, LayoutSpec
from threefold.config import Config
from threefold.data.dataset import names_data, open_dataset
from threefold.errors import UserError
from threefold.launch.worker_pool import WorkerError, WorkerPool
from threefold.models.loss_terms import LossFunction
from threefold.models.source import ConfigSource, ModelSource
from threefold.parallel.forward_check import check_source
from threefold.verify.batches import BatchSource, NestedBatches, OwnBatches, RandomBatches, TokenFileBatches
from threefold.verify.compare import TOLERANCE, coverage
from threefold.verify.rank_worker import SecondRun, run_rank, write_second_trace
from threefold.verify.reference import Trace, write_trace
from threefold.verify.report import FAILED, LayoutResult, judge
from threefold.verify.shrunk_config import compose, with_further_features

_SECOND_EVERY = 3
"""Interval of second runs in the quick default selection: a second run takes as long as the first."""
Check = Callable[[Config], None]
"""Check that raises a `UserError` if a layout's resolved config does not suit the model."""


def suits(config: Config) -> None:
    """Accept every config, for models described by the config alone, whose rules its resolution has checked."""


@dataclass(frozen=True)
class UnsupportedLayout:
    """Unsupported layout, with the error of the config checks."""

    spec: LayoutSpec
    reason: str


@dataclass(frozen=True)
class Selection:
    """Layouts to verify, and the unsupported ones.

    Attributes:
        unsupported: layouts that were left out.
        second_every: every n-th of `specs` makes the second run too.
    """

    specs: tuple[LayoutSpec, ...]
    unsupported: tuple[UnsupportedLayout, ...] = ()
    second_every: int = 1

    def has_second_run(self, spec: LayoutSpec) -> bool:
        """Return whether a layout makes the second run."""
        return self.specs.index(spec) % self.second_every == 0


def products(ranks: int) -> list[Layout]:
    """Return all factorizations of `ranks` into dp · tp · pp · cp."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    return [Layout(dp, tp, pp, cp) for dp, tp, pp, cp in product(sizes, repeat=4) if dp * tp * pp * cp == ranks]


def candidates(layout: Layout, experts: int) -> Iterator[LayoutSpec]:
    """Yield the layout with each schedule, ZeRO stage, expert-parallel size and sequence parallelism with an effect.

    Expert-parallel sizes divide the number of the model's `experts`.
    """
    shares = [ep for ep in range(1, layout.dp + 1) if layout.dp % ep == 0 == experts % ep and (experts or ep == 1)]
    schedules = SCHEDULES if layout.pp > 1 else ("1f1b",)
    stages = range(4) if layout.dp > 1 else (0,)
    shared = (False, True) if layout.tp > 1 else (False,)
    for ep, schedule, zero, sequence in product(shares, schedules, stages, shared):
        given = {"parallel.schedule": schedule, "parallel.zero": zero, "parallel.sequence_parallel": sequence}
        settings = tuple((key, value) for key, value in given.items() if value not in ("1f1b", 0, False))
        yield LayoutSpec(replace(layout, ep=ep), settings)


def possible(ranks: int, experts: int = 0) -> list[LayoutSpec]:
    """Return all candidates of all factorizations of `ranks`, valid or not."""
    return [spec for layout in products(ranks) for spec in candidates(layout, experts)]


def every(base: Config, ranks: int, check: Check = suits) -> Selection:
    """Select all valid candidates of all factorizations of `ranks`."""
    taken, unsupported = [], []
    for spec in possible(ranks, base.model.num_experts):
        reason = unsupported_because(base, spec, check)
        if reason is None:
            taken.append(spec)
        else:
            unsupported.append(UnsupportedLayout(spec, reason))
    return Selection(tuple(taken), tuple(unsupported))


def covering(base: Config, ranks: int, check: Check = suits) -> Selection:
    """Select each factorization of `ranks` once, with features that cover most pairs (greedy pairwise testing).

    For each one, take the candidate that adds most new pairs of features and single features, so that each schedule,
    ZeRO stage, sequence parallelism and recompute mode is covered, and most of their pairs.
    """
    taken: list[LayoutSpec] = []
    seen: set[frozenset[Any]] = set()
    for number, layout in enumerate(products(ranks)):
        tried = candidates(layout, base.model.num_experts)
        found = [spec for spec in tried if unsupported_because(base, spec, check) is None]
        if not found:
            continue
        best = max(found, key=lambda spec: _gain(spec, seen))
        seen |= _meetings(best)
        taken.append(_with_extras(base, best, number, check))
    return Selection(tuple(taken), second_every=_SECOND_EVERY)


def asked_for(base: Config, specs: list[LayoutSpec], check: Check = suits) -> Selection:
    """Select the given layouts; raise a `UserError` if one is unsupported."""
    for spec in specs:
        reason = unsupported_because(base, spec, check)
        if reason is not None:
            raise UserError(f"Unsupported layout {spec}: {reason}")
    return Selection(tuple(specs))


def unsupported_because(base: Config, spec: LayoutSpec, check: Check = suits) -> str | None:
    """Return the error of the config checks or the model's check for a layout; None if it is valid."""
    try:
        check(compose(base, spec))
    except UserError as error:
        return str(error)
    return None


def _gain(spec: LayoutSpec, seen: set[frozenset[Any]]) -> float:
    return sum(1.0 if len(meeting) == 2 else 10.0 for meeting in _meetings(spec) - seen)


def _meetings(spec: LayoutSpec) -> set[frozenset[Any]]:
    layout = spec.layout
    chosen: list[Any] = [*spec.settings, *([("ep", layout.ep)] if layout.ep > 1 else [])]
    facts = [*chosen, *(axis for axis in ("dp", "tp", "pp", "cp") if layout.size(axis) > 1)]
    return {frozenset(pair) for pair in combinations(facts, 2)} | {frozenset([fact]) for fact in chosen}


def _with_extras(base: Config, spec: LayoutSpec, number: int, check: Check) -> LayoutSpec:
    """Return the layout with valid features that `candidates` leaves out: ring attention, recompute, hybrid ZeRO."""
    extras: list[tuple[str, Any]] = []
    if spec.layout.cp > 1 and number % 2:
        extras.append(("parallel.cp_method", "ring"))
    if mode := (None, "selective", "full")[number % 3]:
        extras.append(("train.recompute", mode))
    if spec.setting("parallel.zero") and spec.layout.dp > 2:
        extras.append(("parallel.zero_shards", 2))
    for extra in extras:
        more = replace(spec, settings=(*spec.settings, extra))
        spec = spec if unsupported_because(base, more, check) else more
    return spec


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
    rows: BatchSource | OwnBatches
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
        random = not own_loss and isinstance(self.rows, BatchSource) and not self.rows.is_nested
        return SecondRun(config, RandomBatches() if random else self.rows, self.steps)


def choose_batches(config: Config, loss: LossFunction | None = None) -> BatchSource:
    """Return batches of the config's data, or random ones if it names none; unmasked for a user's loss."""
    masked = loss is None
    if not names_data(config):
        return RandomBatches(masked)
    return NestedBatches(config) if open_dataset(config).is_nested else TokenFileBatches(config, masked)


class Verifier:
    """Comparison of layouts with the single process, one after the other, on a worker pool.

    The pool has as many workers as the largest layout has ranks; the folder gets the trace of the single process.
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
        missing = coverage([report.held for report in reports], self._shapes)
        return judge(spec, reports, list(self._shapes), task.tolerance, time.perf_counter() - started, missing)


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

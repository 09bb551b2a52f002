"""Dry runs of the stages of a pipeline.

With hundreds of micro-batches and stages, most of what the ranks of 1F1B do is the same: a stage with f stages from it
to the end keeps f micro-batches, and takes the others one after another. So its layers are run in short pipelines,
where f is 2, 3 and 4, and with two numbers of micro-batches; where these lie on a line, to the byte, the stage itself
does too. Where they do not, or the pipeline is short, each stage is run as it is.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from threefold.comm.layout import Layout
from threefold.config import Config
from threefold.config.model import OWN
from threefold.models.source import ConfigSource, ModelSource
from threefold.parallel.pipeline.stage_map import stage_map
from threefold.plan.dry_run.rank_run import dry_run
from threefold.plan.dry_run.report import CollectiveTotal, DryRunReport

Tell = Callable[[str, int, int], object]
"""Called with what is run, how many of its passes are done, and how many there are."""

_KEPT = (2, 3, 4)
"""Micro-batches that a stage of the short pipelines keeps."""
_RUN, _MORE = 6, 7
"""Micro-batches of their steps: of all, and of one more run of the shortest."""


def stage_ranks(config: Config) -> list[int]:
    """The first rank at each place of the pipeline: none of the others there needs more."""
    layout = Layout.of(config.parallel)
    return [layout.rank_of(pp=pp) for pp in range(layout.pp)]


def _tell_nothing(what: str, number: int, passes: int) -> None:
    pass


def run_ranks(
    config: Config, ranks: Iterable[int], source: ModelSource | None = None, tell: Tell = _tell_nothing
) -> list[DryRunReport]:
    """`dry_run` of each rank."""
    return [dry_run(config, rank, source, partial(tell, f"rank {rank}")) for rank in ranks]


def run_stages(config: Config, tell: Tell = _tell_nothing) -> list[DryRunReport]:
    """`dry_run` of the first rank of each stage, without a whole run of each where that is not needed.

    Args:
        config: resolved.
        tell: called before each forward pass.

    Raises:
        UserError: as `dry_run`.
    """
    if not _is_regular(config):
        return run_ranks(config, stage_ranks(config), tell=tell)
    return _Line(config, tell).reports()


def _is_regular(config: Config) -> bool:
    """Whether the stages follow from those of shorter pipelines, which pay."""
    parallel, model = config.parallel, config.model
    count = config.train.gradient_accumulation_steps
    if parallel.pp <= 2 * max(_KEPT) or parallel.schedule != "1f1b" or count < max(parallel.pp, _MORE):
        return False
    blocks = range(model.num_layers)
    alike = len({(model.has_experts(block), model.window(block)) for block in blocks}) == 1
    return model.architecture != OWN and alike and config.train.recompute_every == 1


class _Line:
    """The stages of a long pipeline of 1F1B.

    Args:
        config: resolved, and regular.
        tell: called before each forward pass.
    """

    def __init__(self, config: Config, tell: Tell) -> None:
        self.config, self.ranks = config, stage_ranks(config)
        self.tell = tell
        _, plan = ConfigSource().load(config)
        self.plan_layers = plan.layers
        stages = stage_map(plan, config)
        self.sizes = [end - first for first, end in (stages.layers(stage) for stage in range(config.parallel.pp))]
        self.bounds = [stages.layers(stage) for stage in range(config.parallel.pp)]
        self._known: dict[tuple[str, int], Callable[[int, int], DryRunReport] | None] = {}

    def reports(self) -> list[DryRunReport]:
        return [self._report(stage) for stage in range(len(self.sizes))]

    def _report(self, stage: int) -> DryRunReport:
        pp = len(self.sizes)
        if stage == pp - 1:
            found = self._along_micro_batches()
        else:
            kind = ("first" if stage == 0 else "middle", self.sizes[stage])
            if kind not in self._known:
                self._known[kind] = self._along_both(stage)
            found = self._known[kind]
        if found is None:
            return dry_run(self.config, self.ranks[stage], tell=self._of(stage))
        first, end = self.bounds[stage]
        layout = Layout.of(self.config.parallel)
        return replace(
            found(pp - stage, self.config.train.gradient_accumulation_steps),
            rank=self.ranks[stage],
            coordinates=layout.coordinates(self.ranks[stage])._asdict(),
            world_size=layout.world_size,
            layers=self.plan_layers[first:end],
            micro_batches=self.config.train.gradient_accumulation_steps,
        )

    def _along_both(self, stage: int) -> Callable[[int, int], DryRunReport] | None:
        """The reports of a stage's layers by the micro-batches that it keeps and those of a step."""
        runs = [self._short(stage, kept, _RUN) for kept in _KEPT]
        more = self._short(stage, _KEPT[0], _MORE)
        low, middle, high = (_numbers(run) for run in runs)
        along = _per_unit(_numbers(more), low, _MORE - _RUN)
        step = _per_unit(middle, low, 1)
        if step is None or along is None or step != _per_unit(high, middle, 1):
            return None
        return lambda kept, count: _at(runs[0], ((kept - _KEPT[0], step), (count - _RUN, along)))

    def _along_micro_batches(self) -> Callable[[int, int], DryRunReport] | None:
        """The same of the last stage, which keeps one."""
        last = len(self.sizes) - 1
        few, more, most = (self._short(last, 1, count) for count in (_RUN, _MORE, 2 * _MORE - _RUN))
        along = _per_unit(_numbers(more), _numbers(few), _MORE - _RUN)
        if along is None or along != _per_unit(_numbers(most), _numbers(more), _MORE - _RUN):
            return None
        return lambda _kept, count: _at(few, ((count - _RUN, along),))

    def _short(self, stage: int, kept: int, micro_batches: int) -> DryRunReport:
        """A dry run of a stage in a pipeline that ends `kept` stages from it on, with the first and last stages of the
        long one."""
        is_first, is_last = stage == 0, kept == 1
        before = [] if is_first else [self.sizes[0]]
        after = [] if is_last else [self.sizes[1]] * (kept - 2) + [self.sizes[-1]]
        sizes = [*before, self.sizes[stage], *after]
        config, parallel = self.config, self.config.parallel
        train = config.train
        rows = parallel.dp * train.micro_batch_size * micro_batches
        sections = {
            "model": config.model.model_copy(update={"num_layers": sum(sizes) - 2}),
            "parallel": parallel.model_copy(
                update={"pp": len(sizes), "partition": tuple(accumulate(sizes[:-1]))},
            ),
            "train": train.model_copy(
                update={"global_batch_size": rows, "gradient_accumulation_steps": micro_batches},
            ),
        }
        shorter = config.model_copy(update=sections)
        return dry_run(shorter, Layout.of(shorter.parallel).rank_of(pp=len(before)), tell=self._of(stage))

    def _of(self, stage: int) -> Callable[[int, int], object]:
        return partial(self.tell, f"rank {self.ranks[stage]}")


_Numbers = dict[tuple[str, ...], int]


def _numbers(report: DryRunReport) -> _Numbers:
    """All numbers of a report, by name."""
    named: _Numbers = {("peak", kind): nbytes for kind, nbytes in report.at_peak.items()}
    named |= {("cause", kind): nbytes for kind, nbytes in report.causes.items()}
    named |= {(name,): getattr(report, name) for name in _AMOUNTS}
    for each in report.collectives:
        named[each.axis, each.operation, "count"] = each.count
        named[each.axis, each.operation, "nbytes"] = each.nbytes
    return named


_AMOUNTS = ("parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "flops")


def _per_unit(more: _Numbers, fewer: _Numbers, units: int) -> _Numbers | None:
    """By how much each number grows; None where they are others, or do not grow evenly."""
    if more.keys() != fewer.keys() or any((more[name] - fewer[name]) % units for name in more):
        return None
    return {name: (more[name] - fewer[name]) // units for name in more}


def _at(start: DryRunReport, ways: Sequence[tuple[int, _Numbers]]) -> DryRunReport:
    """A report so many units from another."""
    numbers = _numbers(start)
    for units, each in ways:
        numbers = {name: value + units * each[name] for name, value in numbers.items()}
    at_peak = {kind: numbers["peak", kind] for kind in start.at_peak}
    collectives = [
        CollectiveTotal(
            each.axis,
            each.operation,
            numbers[each.axis, each.operation, "count"],
            numbers[each.axis, each.operation, "nbytes"],
        )
        for each in start.collectives
    ]
    amounts: dict[str, Any] = {name: numbers[name,] for name in _AMOUNTS}
    return replace(
        start,
        **amounts,
        activation_bytes=at_peak["activations"],
        peak_bytes=sum(at_peak.values()),
        at_peak=at_peak,
        causes={kind: numbers["cause", kind] for kind in start.causes},
        collectives=collectives,
    )

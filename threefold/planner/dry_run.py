"""Dry run: the training code of one rank of a large layout, in one process and on tensors without memory."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate, count
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from threefold.comm.axis import Axis
from threefold.comm.layout import Layout
from threefold.comm.mesh import Event, Mesh, PlannedAxis
from threefold.config import Config
from threefold.config.model import OWN
from threefold.errors import UserError
from threefold.models.construct import told
from threefold.models.sharding import Constant
from threefold.models.source import ConfigSource, ModelSource
from threefold.parallel.pipeline.partition import stage_map
from threefold.planner.dry_step import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    CollectiveTotal,
    DryRunReport,
    FakeNumbers,
    FlopCount,
    batch_of,
    measure_step,
    totals,
)
from threefold.torch_private.fake import FakeTensor, fake_process_group, fake_tensors, with_memory
from threefold.train.step import Engine

LARGE = 1e6
"""What sums of fake numbers are taken for: above any limit that gradients are clipped to."""


class FakeAxis(Axis):
    """An axis whose other ranks have what this one has."""

    def all_reduce_values(self, tensor: Tensor) -> list[float]:
        self.all_reduce_(tensor)
        if isinstance(tensor, FakeTensor):
            return [LARGE] * len(tensor)
        return [self.size * value for value in tensor.tolist()]


class FakeMesh(Mesh):
    """The mesh of a rank of a fake process group."""

    def _new_group(self, name: str, groups: Sequence[Sequence[int]]) -> PlannedAxis | None:
        with with_memory():
            return super()._new_group(name, groups)

    def _axes(self, planned: Sequence[PlannedAxis]) -> list[Axis]:
        return [
            FakeAxis(name, ranks, ranks.index(self.rank), group, self.recorder, device_mesh)
            for name, ranks, group, device_mesh in planned
        ]


TellPass = Callable[[int, int], object]
"""Called with how many passes of a rank are done, and how many there are."""


def dry_run(
    config: Config, rank: int = 0, source: ModelSource | None = None, tell: TellPass | None = None
) -> DryRunReport:
    """Run one training step of one rank on tensors without memory.

    Args:
        config: resolved; its data need not exist.
        rank: of the layout.
        source: of the model; None for the one that the config names.
        tell: called before each forward pass; None for nothing.

    Raises:
        UserError: the layout has no such rank, or does not suit the model.
        RuntimeError: this process has a process group.
    """
    return run_step(config, rank, source, tell)[0]


def run_step(
    config: Config, rank: int, source: ModelSource | None = None, tell: TellPass | None = None
) -> tuple[DryRunReport, list[Event]]:
    """As `dry_run`; also returns the collectives in order."""
    layout, flops = Layout.of(config.parallel), FlopCount()
    own = config.model.architecture == OWN
    if own and layout.pp > 1:
        raise UserError(
            f"parallel.pp is {layout.pp} but a dry run cannot know what stages of a model of your own send; use 1."
        )
    if not 0 <= rank < layout.world_size:
        last = layout.world_size - 1
        raise UserError(f"rank is {rank} but the layout {layout} has ranks 0 to {last}; use {0 if rank < 0 else last}.")
    with fake_process_group(rank, layout.world_size):
        mesh = FakeMesh(layout)
        batch = batch_of(config, mesh.dp.index)
        with _explaining(own, rank), fake_tensors(), FakeNumbers():
            engine = _make_engine(config, mesh, source or ConfigSource())
            _pad_shards(engine)
            if tell is not None:
                _tell_passes(engine, config.train.gradient_accumulation_steps, tell)
            measured = measure_step(engine, batch, flops)
            layers = tuple(name for stage in engine.stages for name in stage.layer_names)
            parameters = sum(weight.master.numel() for weight in engine.model.weights)
    report = DryRunReport(
        rank=rank,
        coordinates=layout.coordinates(rank)._asdict(),
        world_size=layout.world_size,
        layers=layers,
        micro_batches=config.train.gradient_accumulation_steps,
        parameters=parameters,
        parameter_bytes=measured.held[WEIGHTS],
        gradient_bytes=measured.held[GRADIENTS],
        optimizer_bytes=measured.held[OPTIMIZER],
        activation_bytes=measured.peak[ACTIVATIONS],
        peak_bytes=sum(measured.peak.values()),
        at_peak=measured.peak,
        causes=measured.causes,
        collectives=[CollectiveTotal(*kind, *total) for kind, total in totals(measured.events).items()],
        flops=flops.total,
    )
    return report, measured.events


@contextmanager
def _explaining(own: bool, rank: int) -> Iterator[None]:
    """Says in a sentence what goes wrong in a user's own model, such as shapes that do not go together.

    Without torch's own logs, in which a failing operation comes with a traceback and the whole schedule.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not own:
            raise
        raise UserError(f"The model fails on rank {rank} with {told(error)}.") from error
    finally:
        logging.disable(before)


def _pad_shards(engine: Engine) -> None:
    """With ZeRO, have `fully_shard` look at its parameters before the step, as it does in the first gather: it takes
    shards of uneven sizes for new ones, by their type, and pads them again."""
    if engine.parallelism.zero is None:
        return
    for stage in engine.stages:
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()


def _tell_passes(engine: Engine, micro_batches: int, tell: TellPass) -> None:
    """Have `tell` called before each forward pass of a stage, of which each micro-batch takes one."""
    passes, numbers = micro_batches * len(engine.stages), count()

    def begins(*_: Any) -> None:
        tell(min(next(numbers), passes), passes)  # shapes may be found by a pass more

    for stage in engine.stages:
        stage.register_forward_pre_hook(begins)


def _make_engine(config: Config, mesh: FakeMesh, source: ModelSource) -> Engine:
    make_model, plan = source.load(config)
    # The values of weights that have no memory do not matter.
    return Engine(make_model, replace(plan, initial=lambda _: Constant(0.0)), mesh, config, loss=source.loss(config))


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

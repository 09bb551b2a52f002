"""Dry run: the training code of one rank of a large layout, in one process and on tensors without memory."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, count, pairwise
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from threefold.comm.axis import Axis
from threefold.comm.layout import Layout
from threefold.comm.mesh import Event, Mesh, PlannedAxis
from threefold.config import Config
from threefold.config.model import CUSTOM
from threefold.config.rules import executed_micro_batches
from threefold.errors import UserError
from threefold.models.sharding import Constant
from threefold.models.source import ConfigSource, error_line
from threefold.parallel.pipeline.partition import stage_map
from threefold.planner import dry_step
from threefold.planner.block import UnknownBlock, block_shapes, describe_model
from threefold.planner.dry_step import CollectiveTotal, DryRunReport
from threefold.torch_private.fake import FakeTensor, fake_process_group, fake_tensors, with_memory
from threefold.train.step import Engine
from threefold.train.stop import Requests, Stop

LARGE = 1e6
"""Value assumed for sums of fake numbers: above any limit that gradients are clipped to."""


class FakeAxis(Axis):
    """Axis whose other ranks hold the same values as this one."""

    def all_reduce_values(self, tensor: Tensor) -> list[float]:
        self.all_reduce_(tensor)
        if isinstance(tensor, FakeTensor):
            return [LARGE] * len(tensor)
        return [self.size * value for value in tensor.tolist()]


class NoStop(Stop):
    """Requests to end a run, whose sums are fake numbers and say nothing."""

    def receive(self, found: Requests) -> None:
        """Ignore the sums."""


class FakeMesh(Mesh):
    def _new_group(self, name: str, groups: Sequence[Sequence[int]]) -> PlannedAxis | None:
        with with_memory():
            return super()._new_group(name, groups)

    def _axes(self, planned: Sequence[PlannedAxis]) -> list[Axis]:
        return [
            FakeAxis(name, ranks, ranks.index(self.rank), group, self.recorder, device_mesh, in_tree=self.in_tree)
            for name, ranks, group, device_mesh in planned
        ]


TellPass = Callable[[int, int], object]
"""Callback that takes the number of a rank's passes done and their total."""


def dry_run(config: Config, rank: int = 0, tell: TellPass | None = None) -> DryRunReport:
    """Run one training step of one rank on tensors without memory; the config's data need not exist.

    `tell` is called before each forward pass. Raises a `UserError` if the layout has no such rank or does not suit the
    model, and a RuntimeError if there is a process group already.
    """
    return run_step(config, rank, tell)[0]


def run_step(config: Config, rank: int, tell: TellPass | None = None) -> tuple[DryRunReport, list[Event]]:
    """Run `dry_run` and also return the collectives in order."""
    layout, flops, source = Layout.from_config(config.parallel), dry_step.FlopCount(), ConfigSource()
    is_custom, (micro_batches, _) = config.model.architecture == CUSTOM, executed_micro_batches(config)
    if is_custom and layout.pp > 1:
        raise UserError(
            f"parallel.pp is {layout.pp} but a dry run cannot know what stages of a model of your own send; use 1."
        )
    if not 0 <= rank < layout.world_size:
        last = layout.world_size - 1
        raise UserError(f"rank is {rank} but the layout {layout} has ranks 0 to {last}; use {0 if rank < 0 else last}.")
    with fake_process_group(rank, layout.world_size):
        mesh = FakeMesh(layout, in_tree=config.train.exact)
        batch = dry_step.batch_of(config, mesh.dp.index)
        with _explaining(is_custom, rank), fake_tensors(), dry_step.FakeNumbers():
            make_model, plan = source.load(config)
            plan = replace(plan, initial=lambda _: Constant(0.0))  # weights without memory have no values to initialise
            engine = Engine(make_model, plan, mesh, config, NoStop(), source.loss(config))
            if engine.parallelism.zero is not None:
                # `fully_shard` pads uneven shards; in the step's first gather it would take them for new parameters.
                for module in (each for stage in engine.stages for each in stage.modules()):
                    if isinstance(module, FSDPModule):
                        module.unshard()
                        module.reshard()
            total, numbers = micro_batches * len(engine.stages), count()

            def begins(*_: Any) -> None:
                if tell is not None:
                    tell(min(next(numbers), total), total)  # finding shapes may take one more pass

            for stage in engine.stages if tell is not None else ():  # every micro-batch passes every stage once
                stage.register_forward_pre_hook(begins)
            measured = dry_step.measure_step(engine, batch, flops)
            layers = tuple(name for stage in engine.stages for name in stage.layer_names)
            parameters = sum(weight.master.numel() for weight in engine.model.weights)
    report = DryRunReport(
        rank=rank,
        coordinates=layout.coordinates(rank)._asdict(),
        world_size=layout.world_size,
        layers=layers,
        micro_batches=micro_batches,
        parameters=parameters,
        parameter_bytes=measured.held[dry_step.WEIGHTS],
        gradient_bytes=measured.held[dry_step.GRADIENTS],
        optimizer_bytes=measured.held[dry_step.OPTIMIZER],
        activation_bytes=measured.peak[dry_step.ACTIVATIONS],
        peak_bytes=sum(measured.peak.values()),
        at_peak=measured.peak,
        causes=measured.causes,
        collectives=dry_step.totals(measured.events),
        flops=flops.total,
    )
    return report, measured.events


@contextmanager
def _explaining(is_custom: bool, rank: int) -> Iterator[None]:
    """Turn errors in a custom model, such as mismatched shapes, into one sentence.

    Silences torch's logs, which print a traceback and the whole schedule for a failing operation.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_custom:
            raise
        raise UserError(f"The model fails on rank {rank} with {error_line(error)}.") from error
    finally:
        logging.disable(before)


Tell = Callable[[str, int, int], object]
"""Callback that takes the name of a part, the number of its passes done and their total."""

_KEPT, _RUN = (2, 3, 4), 6
"""Micro-batches that a stage of the shortened pipelines keeps, and those of a step; one or two more show how a step's
numbers grow with them."""
_FEW_PASSES = 100
"""Passes of all stages up to which whole runs take no longer: three or four kinds of stage have 71 or 96 in theirs."""


def stage_ranks(config: Config) -> list[int]:
    """Return the first rank at each pp coordinate; no other rank there needs more."""
    layout = Layout.from_config(config.parallel)
    return [layout.rank_of(pp=pp) for pp in range(layout.pp)]


def run_ranks(config: Config, ranks: Iterable[int], tell: Tell = lambda *_: None) -> list[DryRunReport]:
    return [dry_run(config, rank, tell=partial(tell, f"rank {rank}")) for rank in ranks]


def run_stages(config: Config, tell: Tell = lambda *_: None) -> list[DryRunReport]:
    """Dry-run the first rank of each stage, extrapolating long regular pipelines from short ones."""
    ranks = stage_ranks(config)
    if not _is_regular(config):
        return run_ranks(config, ranks, tell=tell)
    _, plan = ConfigSource().load(config)
    stages, layout = stage_map(plan, config), Layout.from_config(config.parallel)
    bounds = [stages.layers(stage) for stage in range(layout.pp)]
    sizes, count = [end - first for first, end in bounds], config.train.gradient_accumulation_steps
    fits: dict[tuple[str, int], _Fit | None] = {}
    reports = []
    for stage, (rank, size) in enumerate(zip(ranks, sizes, strict=True)):
        kept, tell_rank = layout.pp - stage, partial(tell, f"rank {rank}")
        kind = "first" if stage == 0 else "last" if kept == 1 else "middle", size
        if kind not in fits:
            fits[kind] = _fitted(partial(_run_short, config, sizes, stage, tell_rank), is_last=kept == 1)
        fit = fits[kind]
        if fit is None:
            reports.append(dry_run(config, rank, tell=tell_rank))
            continue
        start, by_kept, by_count = fit
        numbers = {
            name: number + (kept - _KEPT[0]) * by_kept[name] + (count - _RUN) * by_count[name]
            for name, number in _numbers(start).items()
        }
        place: dict[str, Any] = {"rank": rank, "coordinates": layout.coordinates(rank)._asdict()}
        place |= {"world_size": layout.world_size, "layers": plan.layers[slice(*bounds[stage])]}
        reports.append(replace(_with_numbers(start, numbers), **place, micro_batches=count))
    return reports


def _is_regular(config: Config) -> bool:
    """Return whether shorter pipelines can stand in for this one, and save time."""
    parallel, model = config.parallel, config.model
    count = config.train.gradient_accumulation_steps
    if parallel.pp <= max(_KEPT) or parallel.schedule != "1f1b" or count <= max(parallel.pp - 1, _RUN):
        return False
    if parallel.pp * count <= _FEW_PASSES:
        return False
    if model.architecture == CUSTOM or config.train.recompute_every > 1 or config.train.exact:
        return False
    with suppress(UnknownBlock):
        return len(set(block_shapes(describe_model(model, config.data.sequence_length)))) == 1
    return False


_Numbers = dict[tuple[str, ...], int]
_Fit = tuple[DryRunReport, _Numbers, _Numbers]
"""Report, and growth of its numbers with each micro-batch that the stage keeps, and with each of the step."""


def _fitted(run_short: Callable[[int, int], DryRunReport], is_last: bool) -> _Fit | None:
    """Fit a stage's report as linear in the micro-batches kept and those of a step; None if it is not."""
    if is_last:  # it keeps one micro-batch
        along_kept = [run_short(1, _RUN)]
        along_count = [along_kept[0], *(run_short(1, _RUN + more) for more in (1, 2))]
    else:
        along_kept = [run_short(kept, _RUN) for kept in _KEPT]
        along_count = [along_kept[0], run_short(_KEPT[0], _RUN + 1)]
    by_kept, by_count = _growth(along_kept), _growth(along_count)
    return None if by_kept is None or by_count is None else (along_kept[0], by_kept, by_count)


def _run_short(
    config: Config, sizes: Sequence[int], stage: int, tell: TellPass, kept: int, micro_batches: int
) -> DryRunReport:
    """Dry-run a stage as one of the last `kept` of a short pipeline whose first and last stages are the long one's."""
    before = [sizes[0]] if stage else []
    after = [] if kept == 1 else [sizes[1]] * (kept - 2) + [sizes[-1]]
    held = [*before, sizes[stage], *after]
    parallel, train = config.parallel, config.train
    partition = {"pp": len(held), "partition": tuple(accumulate(held[:-1]))}
    rows = parallel.dp * train.micro_batch_size * micro_batches
    batch = {"global_batch_size": rows, "gradient_accumulation_steps": micro_batches}
    model = config.model.model_copy(update={"num_layers": sum(held) - 2})
    sections = {"parallel": parallel.model_copy(update=partition), "train": train.model_copy(update=batch)}
    shorter = config.model_copy(update={"model": model, **sections})
    return dry_run(shorter, Layout.from_config(shorter.parallel).rank_of(pp=len(before)), tell=tell)


def _numbers(report: DryRunReport) -> _Numbers:
    named: _Numbers = {("peak", kind): nbytes for kind, nbytes in report.at_peak.items()}
    named |= {("cause", kind): nbytes for kind, nbytes in report.causes.items()}
    named |= {(name,): getattr(report, name) for name in _AMOUNTS}
    for each in report.collectives:
        named |= {(each.axis, each.operation, name): getattr(each, name) for name in ("count", "nbytes")}
    return named


_AMOUNTS = ("parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "flops")


def _growth(runs: Sequence[DryRunReport]) -> _Numbers | None:
    """Return the growth of each number from run to run; None if the names differ or the growth is uneven."""
    numbers = [_numbers(run) for run in runs]
    if any(each.keys() != numbers[0].keys() for each in numbers):
        return None
    steps = [{name: more[name] - fewer[name] for name in more} for fewer, more in pairwise(numbers)]
    if not steps:
        return dict.fromkeys(numbers[0], 0)
    return steps[0] if all(step == steps[0] for step in steps) else None


def _with_numbers(start: DryRunReport, numbers: _Numbers) -> DryRunReport:
    """Return a report with other numbers; the inverse of `_numbers`."""
    at_peak = {kind: numbers["peak", kind] for kind in start.at_peak}
    amounts: dict[str, Any] = {name: numbers[name,] for name in _AMOUNTS}
    return replace(
        start,
        **amounts,
        activation_bytes=at_peak["activations"],
        peak_bytes=sum(at_peak.values()),
        at_peak=at_peak,
        causes={kind: numbers["cause", kind] for kind in start.causes},
        collectives=[
            CollectiveTotal(*kind, numbers[*kind, "count"], numbers[*kind, "nbytes"])
            for kind in ((each.axis, each.operation) for each in start.collectives)
        ],
    )

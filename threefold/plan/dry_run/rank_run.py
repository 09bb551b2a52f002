"""One rank's training step, by the code that trains, on tensors without memory."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

from torch.distributed.fsdp import FSDPModule

from threefold.comm.layout import Layout
from threefold.comm.mesh import Event
from threefold.config import Config
from threefold.config.model import OWN
from threefold.errors import UserError
from threefold.models.constructor import told
from threefold.models.initial_values import Constant
from threefold.models.source import ConfigSource, ModelSource
from threefold.plan.dry_run.fake_mesh import FakeMesh
from threefold.plan.dry_run.fake_numbers import FakeNumbers
from threefold.plan.dry_run.flops import FlopCount
from threefold.plan.dry_run.report import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS, CollectiveTotal, DryRunReport
from threefold.plan.dry_run.step import batch_of, measure_step, totals
from threefold.torch_private.fake import fake_process_group, fake_tensors
from threefold.train.engine import Engine

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

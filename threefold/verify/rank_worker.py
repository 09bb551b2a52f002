"""Worker of a verified layout: each rank trains with the engine and compares its shards with the single process."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from threefold.comm.layout import Layout
from threefold.comm.mesh import Event, Mesh
from threefold.config import Config
from threefold.models.source import ModelSource
from threefold.parallel.parameter import axes_of, offset
from threefold.train.engine import Engine
from threefold.verify.batches import BatchSource
from threefold.verify.compare import Comparison, Error, Held
from threefold.verify.own_batches import OwnBatches
from threefold.verify.reference import Trace


@dataclass(frozen=True)
class RankReport:
    """Results of a rank.

    Attributes:
        errors: of all comparisons, in the order of computation.
        held: its shards of the parameters.
        sent: axis → bytes of its tensors in the collectives of one step.
        cut: the axes over which any of its parameters is sharded.
    """

    errors: list[Error]
    held: list[Held]
    sent: dict[str, int]
    cut: frozenset[str] = frozenset()


def run_rank(
    source: ModelSource,
    config: Config,
    rows: BatchSource | OwnBatches,
    steps: int,
    folder: str,
) -> RankReport:
    """Train for `steps` steps as a rank of the config's layout, and compare with the trace in `folder`."""
    mesh = Mesh(Layout.of(config.parallel))
    make_model, plan = source.load(config)
    engine = Engine(make_model, plan, mesh, config, loss=source.loss(config))
    held = held_parts(engine)
    comparison = Comparison(Trace.load(Path(folder)), held, dist.get_rank())
    comparison.initial(_masters(engine))
    sent: dict[str, int] = {}
    for step in range(steps):
        batch = rows.batch(config, step, mesh.dp.index, mesh.dp.size)
        with mesh.recorder.recording() as events:
            term, tokens = engine.compute_gradients(batch, step)
            gradients = {entry.name: entry.gradient.clone() for entry in engine.optimizer.entries}
            result = engine.update(term, tokens, step)
        sent = _bytes(events)
        comparison.gradients(step, gradients)
        comparison.scalars(step, result.loss, result.grad_norm)
        comparison.weights(step, _masters(engine))
    cut = frozenset(axis for entry in engine.model.weights for axis in axes_of(entry.parameter))
    return RankReport(comparison.errors, list(held.values()), sent, cut)


def held_parts(engine: Engine) -> dict[str, Held]:
    """This rank's shard of each parameter of its stages, by name."""
    numbers = engine.parallelism.stages.held_by(engine.mesh.pp.index)
    stages: dict[str, int] = {}
    for number, stage in zip(numbers, engine.stages, strict=True):
        for name, _ in stage.named_parameters():
            stages.setdefault(engine.plan.whole_name(name), number)
    return {
        entry.name: Held(entry.name, stages[entry.name], offset(entry.parameter), tuple(entry.master.shape))
        for entry in engine.model.weights
    }


def _masters(engine: Engine) -> dict[str, Tensor]:
    return {weight.name: weight.master.detach() for weight in engine.model.weights}


def _bytes(events: Iterable[Event]) -> dict[str, int]:
    total: dict[str, int] = {}
    for event in events:
        total[event.axis] = total.get(event.axis, 0) + event.nbytes
    return total

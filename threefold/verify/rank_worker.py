"""Worker of a verified layout: each rank trains with the engine and compares its shards with the single process."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from threefold.comm.mesh import Event, Mesh
from threefold.config import Config
from threefold.config.optimizer import BUILT_IN
from threefold.models.source import ModelSource
from threefold.parallel.moving_buffers import stored_buffers
from threefold.parallel.parameter import axes_of
from threefold.verify.batches import BatchSource
from threefold.verify.compare import EVALUATION, TOLERANCE, Comparison, Error, Held
from threefold.verify.own_batches import OwnBatches
from threefold.verify.reference import Trace
from threefold.verify.second_run import SecondRun, second_errors
from threefold.verify.tiny_engine import gradients_of, held_parts, tiny_engine, tiny_mesh, weights_of


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
    second: tuple[Config, SecondRun] | None = None,
    mesh: Mesh | None = None,
) -> RankReport:
    """Train for `steps` steps as a rank of the config's layout, and compare with the trace in `folder`.

    Args:
        source: the model.
        config: of the layout.
        rows: the batches.
        steps: optimizer steps.
        folder: has the traces of one process.
        second: the layout's config in the second run, and that run; None for the first run alone.
        mesh: of the layout; None for one that is made here.
    """
    mesh, expected = mesh or tiny_mesh(config), Trace.load(Path(folder))
    engine = tiny_engine(source, config, mesh, expected.limit)
    held = held_parts(engine)
    comparison = Comparison(expected, held, dist.get_rank())
    comparison.initial(weights_of(engine))
    sent: dict[str, int] = {}
    for step in range(steps):
        batch = rows.batch(config, step, mesh.dp.index, mesh.dp.size)
        with mesh.recorder.recording() as events:
            term, tokens = engine.compute_gradients(batch, step)
            if step in expected.evaluations:
                of_step = len(events)
                evaluated = engine.eval_batch(batch, engine.loss).loss
                del events[of_step:]
                comparison.number(EVALUATION, step, evaluated, expected.evaluations[step])
            gradients = {name: gradient.clone() for name, gradient in gradients_of(engine).items()}
            result = engine.update(term, tokens, step)
        sent = _bytes(events)
        comparison.gradients(step, gradients)
        comparison.scalars(step, result.loss, result.grad_norm)
        if config.optimizer.name in BUILT_IN:  # those of others may change what they are given
            comparison.clipped(step, gradients_of(engine))
        comparison.weights(step, weights_of(engine))
        comparison.buffers(step, stored_buffers(engine.stages))
    cut = frozenset(axis for entry in engine.model.weights for axis in axes_of(entry.parameter))
    errors = comparison.errors
    if second is not None:
        limit = TOLERANCE[config.precision.dtype]
        is_equal = all(error.relative <= limit for error in errors) and held.keys() <= expected.initial.keys()
        if all(mesh.world.gather_objects(is_equal)):  # else there is nothing more to learn
            errors = errors + second_errors(source, *second, mesh, folder)
    return RankReport(errors, list(held.values()), sent, cut)


def _bytes(events: Iterable[Event]) -> dict[str, int]:
    total: dict[str, int] = {}
    for event in events:
        total[event.axis] = total.get(event.axis, 0) + event.nbytes
    return total

"""Verification on one rank: trains the layout in tiny pieces and compares it with the trace of one process."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch import Tensor

from threefold.checkpoint.folder import Checkpoint, path_of
from threefold.checkpoint.manifest import Facts, read_manifest
from threefold.checkpoint.save import save_checkpoint
from threefold.comm.layout import Layout, LayoutSpec
from threefold.comm.mesh import Event, Mesh, SharedMemorySizes
from threefold.config import Config
from threefold.config.optimizer import BUILT_IN
from threefold.models.source import ModelSource
from threefold.parallel.moving_buffers import stored_buffers
from threefold.parallel.parameter import axes_of, offset
from threefold.parallel.settings import PieceSizes
from threefold.train.optim import LossScale
from threefold.train.state import checkpoint_tensors, loss_scale_facts, restore_engine
from threefold.train.step import Engine
from threefold.verify.batches import BatchSource, OwnBatches
from threefold.verify.compare import EVALUATION, SCALE, SMALL, TOLERANCE, Comparison, Error, Held
from threefold.verify.reference import CLIP_SHARE, OneProcess, Trace
from threefold.verify.shrunk_config import compose

PIECES: Final = PieceSizes(bucket_bytes=8 << 10, norm_elements=16, logits_at_once=1 << 5)
SHARED_MEMORY: Final = SharedMemorySizes(slot=4 << 10, sharing=2 << 10)
"""Sizes that divide even a shrunk model's tensors into several full and partial pieces, so that a mistake at a bound,
or in all but the first piece, is no smaller than in the full model."""


def tiny_mesh(config: Config) -> Mesh:
    """Return the mesh of a config's layout, with tiny pieces in shared memory."""
    return Mesh(Layout.from_config(config.parallel), sizes=SHARED_MEMORY)


def tiny_engine(
    source: ModelSource, config: Config, mesh: Mesh, clip: float, loss_scale: LossScale | None = None
) -> Engine:
    """Return an engine with tiny pieces that clips to norm `clip`, 0 for no clip."""
    optimizer = config.optimizer.model_copy(update={"clip_grad_norm": clip})
    config = config.model_copy(update={"optimizer": optimizer})
    make_model, plan = source.load(config)
    return Engine(make_model, plan, mesh, config, loss=source.loss(config), loss_scale=loss_scale, pieces=PIECES)


def held_parts(engine: Engine) -> dict[str, Held]:
    """Return this rank's shard of each parameter of its stages, by name."""
    numbers = engine.parallelism.stages.held_by(engine.mesh.pp.index)
    stages: dict[str, int] = {}
    for number, stage in zip(numbers, engine.stages, strict=True):
        for name, _ in stage.named_parameters():
            stages.setdefault(engine.plan.whole_name(name), number)
    return {
        entry.name: Held(entry.name, stages[entry.name], offset(entry.parameter), tuple(entry.master.shape))
        for entry in engine.model.weights
    }


def weights_of(engine: Engine) -> dict[str, Tensor]:
    """Return this rank's part of each master weight."""
    return {weight.name: weight.master.detach() for weight in engine.model.weights}


def gradients_of(engine: Engine) -> dict[str, Tensor]:
    """Return this rank's part of each gradient."""
    return {entry.name: entry.gradient.detach() for entry in engine.optimizer.entries}


MIXED: Final = "dropout, documents, loss scale"
OVERFLOW: Final = "overflow"
SKIPPED: Final = "skipped step"
RESUMED: Final = "resume"
MOVED: Final = "resume from one process"
CHECKS: Final = (MIXED, OVERFLOW, SKIPPED, RESUMED, MOVED)
"""Checks of the second run, in order; a departure belongs to the first check that sees it."""

_STEPS: Final = (0, 1, 3, 4)  # step 2 is skipped
_OVERFLOWS, _SAVED = 1, 2  # indices in _STEPS
_SCALE, _WINDOW = 4096.0, 2
_SCALES: Final = (4096.0, 2048.0, 2048.0, 4096.0)
"""Loss scale after each step: halved by the overflow, doubled by the second good step, after the checkpoint."""
_OF_ONE_PROCESS, _OF_LAYOUT = "one-process", "layout"


@dataclass(frozen=True)
class SecondRun:
    """Second training run of a verification, with further features.

    Attributes:
        config: config of the single process.
        steps: steps of the first run; only their batches are used, as the user may have no others.
    """

    config: Config
    rows: BatchSource | OwnBatches
    steps: int


def write_second_trace(source: ModelSource, run: SecondRun, folder: str) -> None:
    """Write the trace of one process to `folder`, and the checkpoint of an engine on one rank."""
    path = Path(folder) / "second"
    for name in (_OF_ONE_PROCESS, _OF_LAYOUT):
        (path / name).mkdir(parents=True, exist_ok=True)
    make_model, plan = source.load(run.config)
    alone = OneProcess(make_model, plan, run.config, source.loss(run.config), CLIP_SHARE)
    for place, step in enumerate(_STEPS):
        batch = run.rows.batch(run.config, step % run.steps)
        alone.step(batch, step, updates=place != _OVERFLOWS, evaluates=place == _SAVED + 1)
    alone.trace.save(path)
    config = compose(run.config, LayoutSpec(Layout()))
    training = _Training(source, config, run, tiny_mesh(config), Trace.load(path))
    training.steps(_SAVED + 1)
    training.save(path / _OF_ONE_PROCESS)


def second_errors(source: ModelSource, config: Config, run: SecondRun, mesh: Mesh, folder: str) -> list[Error]:
    """Make the second run as a rank of the config's layout, and compare it with the trace in `folder`. Collective."""
    path = Path(folder) / "second"
    expected = Trace.load(path)
    first = _Training(source, config, run, mesh, expected)
    first.steps(_SAVED + 1)
    checkpoint = first.save(path / _OF_LAYOUT)
    second = _Training(source, config, run, mesh, expected)
    second.resume(checkpoint, RESUMED)
    # An evaluation gathers weights, which must not outlive the load of other weights.
    second.evaluate()
    second.resume(_checkpoint(path / _OF_ONE_PROCESS), MOVED)
    return first.errors + second.errors


class _Training:
    """Engine of this rank, compared step by step."""

    def __init__(self, source: ModelSource, config: Config, run: SecondRun, mesh: Mesh, expected: Trace) -> None:
        self.config, self.run, self.mesh, self.expected = config, run, mesh, expected
        self.engine: Engine = tiny_engine(source, config, mesh, expected.limit, LossScale(_SCALE, _WINDOW))
        self.held = held_parts(self.engine)
        self.errors: list[Error] = []

    def steps(self, count: int) -> None:
        for place in range(count):
            self._step(place, CHECKS[place])

    def resume(self, checkpoint: Checkpoint, check: str) -> None:
        restore_engine(self.engine, checkpoint)
        comparison = self._comparison(check)
        comparison.weights(_SAVED, weights_of(self.engine))
        comparison.number(SCALE, _SAVED, self._scale, _SCALES[_SAVED])
        self.errors += comparison.errors
        self._step(_SAVED + 1, check)

    def evaluate(self) -> None:
        batch = self.run.rows.batch(self.config, 0, self.mesh.dp.index, self.mesh.dp.size)
        self.engine.eval_batch(batch, self.engine.loss)

    def save(self, folder: Path) -> Checkpoint:
        scale, good_steps = loss_scale_facts(self.engine)
        seed, step = self.config.train.seed, _STEPS[_SAVED] + 1
        facts = Facts(step, 0, seed, None, None, 0, 0, loss_scale=scale, good_steps=good_steps)
        save_checkpoint(folder, facts, checkpoint_tensors(self.engine), {}, self.mesh.world)
        return _checkpoint(folder)

    @property
    def _scale(self) -> float:
        assert self.engine.loss_scale is not None  # the constructor sets it
        return self.engine.loss_scale.value

    def _comparison(self, check: str) -> Comparison:
        return Comparison(self.expected, self.held, self.mesh.rank, SMALL, check)

    def _step(self, place: int, check: str) -> None:
        engine, step, comparison = self.engine, _STEPS[place], self._comparison(check)
        batch = self.run.rows.batch(self.config, step % self.run.steps, self.mesh.dp.index, self.mesh.dp.size)
        term, tokens = engine.compute_gradients(batch, step)
        if place in self.expected.evaluations:
            evaluated = engine.eval_batch(batch, engine.loss).loss
            comparison.number(EVALUATION, place, evaluated, self.expected.evaluations[place])
        comparison.gradients(place, {name: gradient.clone() for name, gradient in gradients_of(engine).items()})
        if place == _OVERFLOWS:
            self._overflow()
        result = engine.update(term, tokens, step)
        comparison.scalars(place, result.loss, self.expected.norms[place] if result.skipped else result.grad_norm)
        comparison.weights(place, weights_of(engine))
        comparison.number(SCALE, place, self._scale, _SCALES[place])
        if result.skipped != (place == _OVERFLOWS):
            comparison.number(SCALE, place, inf, 1.0)
        self.errors += comparison.errors

    def _overflow(self) -> None:
        """Make a gradient overflow on the last rank that holds any."""
        filled = [entry for entry in self.engine.optimizer.entries if entry.gradient.numel()]
        holders = [rank for rank, holds in enumerate(self.mesh.world.gather_objects(bool(filled))) if holds]
        if self.mesh.rank == holders[-1]:
            filled[-1].gradient[(0,) * filled[-1].gradient.dim()] = inf


def _checkpoint(folder: Path) -> Checkpoint:
    path = path_of(folder, _STEPS[_SAVED] + 1)
    return Checkpoint(path, read_manifest(path).facts)


@dataclass(frozen=True)
class RankReport:
    """Results of a rank.

    Attributes:
        errors: errors of all comparisons, in the order of computation.
        held: shards of the parameters on this rank.
        sent: axis → bytes of this rank's tensors in the collectives of one step.
        cut: axes that shard any of its parameters.
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
        source: source of the model.
        config: config of the layout.
        rows: source of the batches.
        steps: optimizer steps.
        folder: folder with the traces of one process.
        second: the second run, preceded by the layout's config in it; None for the first run only.
        mesh: mesh of the layout; None to make it here.
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
        if config.optimizer.name in BUILT_IN:  # other packages' optimizers may change the gradients that they are given
            comparison.clipped(step, gradients_of(engine))
        comparison.weights(step, weights_of(engine))
        comparison.buffers(step, stored_buffers(engine.stages))
    cut = frozenset(axis for entry in engine.model.weights for axis in axes_of(entry.parameter))
    errors = comparison.errors
    if second is not None:
        limit = TOLERANCE[config.precision.dtype]
        is_equal = all(error.relative <= limit for error in errors) and held.keys() <= expected.initial.keys()
        if all(mesh.world.gather_objects(is_equal)):  # after a departure the second run adds nothing
            errors = errors + second_errors(source, *second, mesh, folder)
    return RankReport(errors, list(held.values()), sent, cut)


def _bytes(events: Iterable[Event]) -> dict[str, int]:
    total: dict[str, int] = {}
    for event in events:
        total[event.axis] = total.get(event.axis, 0) + event.nbytes
    return total

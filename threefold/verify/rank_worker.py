"""Verification on one rank: trains the layout in tiny chunks and compares it with the trace of one process."""

from collections import Counter
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

from torch import Tensor

from threefold.checkpoint.folder import CONFIG, path_of
from threefold.checkpoint.manifest import Checkpoint, Facts, read_manifest
from threefold.checkpoint.resume import consumed_by
from threefold.checkpoint.save import save_checkpoint
from threefold.comm.layout import Layout, LayoutSpec
from threefold.comm.mesh import Event, Mesh
from threefold.config import Config
from threefold.data.order import ConsumedSamples
from threefold.models.loss_terms import LOSS
from threefold.models.source import ModelSource
from threefold.parallel.parallelize import ChunkSizes
from threefold.parallel.parameter import axes_of, offset
from threefold.parallel.running_statistics import stored_buffers
from threefold.train.gradient_update import LossScale
from threefold.train.state import checkpoint_tensors, loss_scale_facts, restore_engine
from threefold.train.step import Engine
from threefold.verify.batches import BatchSource
from threefold.verify.compare import CONSUMED, EVALUATED, EVALUATION, SCALE, TOLERANCE, Comparison, Error, Held
from threefold.verify.exported import compare_exports, is_exported
from threefold.verify.layouts import compose
from threefold.verify.reference import CLIP_SHARE, RATE, READ, SAMPLES, TOKENS, OneProcess, Trace

CHUNKS: Final = ChunkSizes(bucket_bytes=8 << 10, norm_elements=16, logits_at_once=1 << 5)
SHARED_MEMORY: Final = (4 << 10, 2 << 10)
"""Sizes that divide even a shrunk model's tensors into several full and partial chunks, so that a mistake at a bound,
or in all but the first chunk, is no smaller than in the full model."""


MIXED: Final = "dropout, documents, loss scale"
OVERFLOW: Final = "overflow"
SKIPPED: Final = "skipped step"
RESUMED: Final = "resume"
MOVED: Final = "resume from one process"
EXPORT: Final = "export to Hugging Face"
CHECKS: Final = (MIXED, OVERFLOW, SKIPPED, RESUMED, MOVED, EXPORT)
"""Checks of the second run, in order; a departure belongs to the first check that sees it."""

_STEPS: Final = (0, 1, 3, 4)  # step 2 is skipped
_OVERFLOWS, _SAVED = 1, 2  # indices in _STEPS
_SCALE, _WINDOW = 4096.0, 2
_SCALES: Final = (4096.0, 2048.0, 2048.0, 4096.0)
"""Loss scale after each step: halved by the overflow, doubled by the second good step, after the checkpoint."""
_OF_ONE_PROCESS, _OF_LAYOUT = "one-process", "layout"


@dataclass(frozen=True)
class SecondRun:
    """Second training run of a verification, with further features, on the batches of the first run's `steps`."""

    config: Config
    rows: BatchSource
    steps: int


def tiny_mesh(config: Config) -> Mesh:
    """Return the mesh of a config's layout, with tiny chunks in shared memory."""
    return Mesh(Layout.from_config(config.parallel), in_tree=config.train.exact, sizes=SHARED_MEMORY)


@dataclass(frozen=True)
class RankReport:
    """Results of a rank.

    Attributes:
        errors: errors of all comparisons, in the order of computation.
        sent: axis → bytes of this rank's tensors in the collectives of one step.
        cut: axes that shard any of its parameters.
    """

    errors: list[Error]
    held: list[Held]
    sent: dict[str, int]
    cut: frozenset[str] = frozenset()


def make_engine(
    source: ModelSource,
    config: Config,
    mesh: Mesh,
    limit: float,
    chunks: ChunkSizes,
    loss_scale: LossScale | None = None,
) -> Engine:
    """Return the engine of a config that clips gradients to the norm `limit`; 0 for no clip."""
    clipped = config.optimizer.model_copy(update={"clip_grad_norm": limit})
    config = config.model_copy(update={"optimizer": clipped})
    make_model, plan = source.load(config)
    return Engine(make_model, plan, mesh, config, loss=source.loss(config), loss_scale=loss_scale, chunks=chunks)


def master_weights(engine: Engine) -> dict[str, Tensor]:
    """Return this rank's part of each master weight."""
    return {weight.name: weight.master.detach() for weight in engine.model.weights}


def averages_of(engine: Engine) -> dict[str, Tensor]:
    """Return this rank's part of the moving average of each trained weight; nothing without one."""
    return {entry.name: average for entry, average in engine.optimizer.averages()}


class _Training:
    """Training on this rank in the config's layout, in tiny chunks, compared with a trace step by step.

    The second run has a `loss_scale`; its steps are those of `_STEPS`, on the batches of the first `batches` steps.
    """

    def __init__(
        self,
        source: ModelSource,
        config: Config,
        rows: BatchSource,
        mesh: Mesh,
        expected: Trace,
        batches: int,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.config, self.rows, self.mesh, self.expected, self.batches = config, rows, mesh, expected, batches
        self.engine = engine = make_engine(source, config, mesh, expected.limit, CHUNKS, loss_scale)
        stages: dict[str, int] = {}
        for number, stage in zip(engine.parallelism.stages.held_by(mesh.pp.index), engine.stages, strict=True):
            for name, _ in stage.named_parameters():
                stages.setdefault(engine.plan.whole_name(name), number)
        self.held = {  # this rank's shard of each parameter of its stages
            weight.name: Held(weight.name, stages[weight.name], offset(weight.parameter), tuple(weight.master.shape))
            for weight in engine.model.weights
        }
        self.comparison = Comparison(expected, self.held, mesh.rank)

    def step(self, place: int, check: str = "") -> list[Event]:
        """Make the step at an index of the trace, compare it, and return its collectives.

        `check` is that of the second run which the step belongs to; empty in the first run.
        """
        engine, comparison, expected = self.engine, self.comparison, self.expected
        step, comparison.check = _STEPS[place] if check else place, check
        batch = self.rows.batch(self.config, step % self.batches, self.mesh.dp.index, self.mesh.dp.size)
        with self.mesh.recorder.recording() as events:
            term, tokens = engine.compute_gradients(batch, step)
            if place in expected.evaluations:
                of_step = len(events)
                evaluated = engine.eval_batch(batch, engine.loss)
                del events[of_step:]
                comparison.number(EVALUATION, place, evaluated.loss, expected.evaluations[place])
                if engine.loss is None and not engine.plan.of_pairs:
                    comparison.number(EVALUATED, place, evaluated.counts[LOSS], expected.reported[place][TOKENS])
            entries = engine.optimizer.entries
            gradients = {entry.name: entry.gradient.detach().clone() for entry in entries}
            overflows = bool(check) and place == _OVERFLOWS
            if overflows:  # on the last rank that holds any gradient
                filled = [entry.gradient for entry in entries if entry.gradient.numel()]
                holds = self.mesh.world.gather_objects(bool(filled))
                if self.mesh.rank == max(rank for rank, has_any in enumerate(holds) if has_any):
                    filled[-1][(0,) * filled[-1].dim()] = inf
            result = engine.update(term, tokens, step)
        comparison.gradients(place, gradients)
        norm = expected.norms[place] if check and result.skipped else result.grad_norm
        comparison.scalars(place, result.loss, norm)
        counts = {TOKENS: result.tokens, READ: result.tokens_read, SAMPLES: engine.samples}
        comparison.reported(place, {RATE: result.lr, **counts})
        if not check and self.config.optimizer.is_built_in:  # other packages' may change the gradients they get
            comparison.clipped(place, {entry.name: entry.gradient.detach() for entry in entries})
        self._compare_state(place)
        comparison.buffers(place, stored_buffers(engine.stages))
        if check and result.skipped != overflows:
            comparison.number(SCALE, place, inf, 1.0)
        return events

    def resume(self, checkpoint: Checkpoint, check: str) -> None:
        """Load a checkpoint, and run the step after it."""
        restore_engine(self.engine, checkpoint)
        self.comparison.check = check
        self._compare_state(_SAVED)
        step = _STEPS[_SAVED] + 1
        consumed = step * self.expected.reported[_SAVED][SAMPLES]
        self.comparison.number(CONSUMED, _SAVED, consumed_by(checkpoint, self.config).before(step), consumed)
        self.step(_SAVED + 1, check)

    def save(self, folder: Path) -> Checkpoint:
        """Write a checkpoint of the state after the step `_SAVED`."""
        scale, good_steps = loss_scale_facts(self.engine)
        train, step = self.config.train, _STEPS[_SAVED] + 1
        consumed = ConsumedSamples(train.global_batch_size).before(step)
        facts = Facts(step, consumed, train.seed, None, None, 0, 0, loss_scale=scale, good_steps=good_steps)
        save_checkpoint(
            folder, facts, checkpoint_tensors(self.engine), {CONFIG: self.config.to_yaml()}, self.mesh.world
        )
        return _checkpoint(folder)

    def export(self, folder: Path) -> None:
        """Export the checkpoint in a folder to Hugging Face, read the export back, and compare its weights."""
        self.comparison.check = EXPORT
        compare_exports(self.comparison, self.config, folder, _SAVED)

    def _compare_state(self, place: int) -> None:
        """Compare weights and averages, counts of updates in the optimizer state if it has them, and any loss scale."""
        comparison, optimizer = self.comparison, self.engine.optimizer
        comparison.weights(place, master_weights(self.engine))
        comparison.averages(place, averages_of(self.engine))
        if self.config.optimizer.is_built_in:
            states = {entry.name: optimizer.rule.state(entry) for entry in optimizer.entries}
            comparison.updates(place, {name: each["step"] for name, each in states.items() if "step" in each})
        if self.engine.loss_scale is not None:
            comparison.number(SCALE, place, self.engine.loss_scale.value, _SCALES[place])


def run_rank(
    source: ModelSource,
    config: Config,
    rows: BatchSource,
    steps: int,
    folder: str,
    second: tuple[Config, SecondRun] | None = None,
    mesh: Mesh | None = None,
) -> RankReport:
    """Train for `steps` steps as a rank of the config's layout, and compare with the trace in `folder`.

    The second run, if any, is preceded by the layout's config in it. Without a mesh, it is made here.
    """
    mesh, expected = mesh or tiny_mesh(config), Trace.load(Path(folder))
    training = _Training(source, config, rows, mesh, expected, steps)
    training.comparison.initial(master_weights(training.engine))
    sent: Counter[str] = Counter()
    for step in range(steps):
        sent.clear()
        for event in training.step(step):
            sent[event.axis] += event.nbytes
    cut = frozenset(axis for weight in training.engine.model.weights for axis in axes_of(weight.parameter))
    errors, held = training.comparison.errors, training.held
    if second is not None:
        limit = TOLERANCE[config.precision.dtype]
        is_equal = all(error.relative <= limit for error in errors) and held.keys() <= expected.initial.keys()
        if all(mesh.world.gather_objects(is_equal)):  # after a departure the second run adds nothing
            errors = errors + _second_errors(source, *second, mesh, Path(folder) / "second")
    return RankReport(errors, list(held.values()), dict(sent), cut)


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
    _second_training(source, config, run, tiny_mesh(config), path).save(path / _OF_ONE_PROCESS)


def _second_errors(source: ModelSource, config: Config, run: SecondRun, mesh: Mesh, path: Path) -> list[Error]:
    """Make the second run as a rank of the config's layout, and compare it with the trace at `path`. Collective."""
    first = _second_training(source, config, run, mesh, path)
    checkpoint = first.save(path / _OF_LAYOUT)
    second = _second_training(source, config, run, mesh, path, steps=0)
    second.resume(checkpoint, RESUMED)
    # An evaluation gathers weights, which must not outlive the load of other weights.
    second.engine.eval_batch(run.rows.batch(config, 0, mesh.dp.index, mesh.dp.size), second.engine.loss)
    second.resume(_checkpoint(path / _OF_ONE_PROCESS), MOVED)
    if mesh.rank == 0 and is_exported(source, config):
        first.export(path / _OF_LAYOUT)
    return first.comparison.errors + second.comparison.errors


def _second_training(
    source: ModelSource, config: Config, run: SecondRun, mesh: Mesh, path: Path, steps: int = _SAVED + 1
) -> _Training:
    training = _Training(source, config, run.rows, mesh, Trace.load(path), run.steps, LossScale(_SCALE, _WINDOW))
    assert training.engine.loss_scale is not None  # its values are compared
    for place in range(steps):
        training.step(place, CHECKS[place])
    return training


def _checkpoint(folder: Path) -> Checkpoint:
    return read_manifest(path_of(folder, _STEPS[_SAVED] + 1))

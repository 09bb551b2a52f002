"""The second run of each layout: what a long run meets, beside one process that meets the same.

Four steps with dropout, packed documents and a loss scale, at the full accuracy of the first run: the gradients of the
second overflow on one rank, so that no rank updates; the one after it is passed over, as `data.skip_steps` does; after
the next a checkpoint is saved, from which another engine makes the last, with an evaluation in it. That one then goes
back to the checkpoint that one process has saved, and makes the last step again.
"""

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

from threefold.checkpoint.folder import Checkpoint, path_of
from threefold.checkpoint.manifest import Facts, read_manifest
from threefold.checkpoint.save import save_checkpoint
from threefold.comm.layout import Layout
from threefold.comm.layout_spec import LayoutSpec
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.models.source import ModelSource
from threefold.train.engine import Engine
from threefold.train.loss_scale import LossScale
from threefold.train.state import checkpoint_tensors, loss_scale_facts, restore_engine
from threefold.verify.batches import BatchSource
from threefold.verify.compare import EVALUATION, SCALE, SMALL, Comparison, Error
from threefold.verify.own_batches import OwnBatches
from threefold.verify.reference import CLIP_SHARE, OneProcess, Trace
from threefold.verify.shrunk_config import compose
from threefold.verify.tiny_engine import gradients_of, held_parts, tiny_engine, tiny_mesh, weights_of

MIXED: Final = "dropout, documents, loss scale"
OVERFLOW: Final = "overflow"
SKIPPED: Final = "skipped step"
RESUMED: Final = "resume"
MOVED: Final = "resume from one process"
CHECKS: Final = (MIXED, OVERFLOW, SKIPPED, RESUMED, MOVED)
"""What the second run checks, in order; a departure belongs to the first that sees it."""

_STEPS: Final = (0, 1, 3, 4)  # 2 is passed over
_OVERFLOWS, _SAVED = 1, 2  # places in _STEPS
_SCALE, _WINDOW = 4096.0, 2
_SCALES: Final = (4096.0, 2048.0, 2048.0, 4096.0)
"""After each step: halved by the overflow, and doubled by the second good step after it, of which the first is before
the checkpoint."""
_OF_ONE_PROCESS, _OF_LAYOUT = "one-process", "layout"


@dataclass(frozen=True)
class SecondRun:
    """What the second run trains.

    Attributes:
        config: of the single process.
        rows: the batches.
        steps: of the first run; batches are taken of these alone, as the user's may have no others.
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
    """Make the second run as a rank of the config's layout, and compare it with the trace in `folder`.

    Collective over the world.
    """
    path = Path(folder) / "second"
    expected = Trace.load(path)
    first = _Training(source, config, run, mesh, expected)
    first.steps(_SAVED + 1)
    checkpoint = first.save(path / _OF_LAYOUT)
    second = _Training(source, config, run, mesh, expected)
    second.resume(checkpoint, RESUMED)
    # What the evaluation has gathered of the weights is out of date when others are loaded.
    second.evaluate()
    second.resume(_checkpoint(path / _OF_ONE_PROCESS), MOVED)
    return first.errors + second.errors


class _Training:
    """An engine of this rank, compared step by step."""

    def __init__(self, source: ModelSource, config: Config, run: SecondRun, mesh: Mesh, expected: Trace) -> None:
        self.config, self.run, self.mesh, self.expected = config, run, mesh, expected
        self.engine: Engine = tiny_engine(source, config, mesh, expected.limit, LossScale(_SCALE, _WINDOW))
        self.held = held_parts(self.engine)
        self.errors: list[Error] = []

    def steps(self, count: int) -> None:
        """Make the first steps."""
        for place in range(count):
            self._step(place, CHECKS[place])

    def resume(self, checkpoint: Checkpoint, check: str) -> None:
        """Load a checkpoint, and make the step after it."""
        restore_engine(self.engine, checkpoint)
        comparison = self._comparison(check)
        comparison.weights(_SAVED, weights_of(self.engine))
        comparison.number(SCALE, _SAVED, self._scale, _SCALES[_SAVED])
        self.errors += comparison.errors
        self._step(_SAVED + 1, check)

    def evaluate(self) -> None:
        """Evaluate the first batch."""
        batch = self.run.rows.batch(self.config, 0, self.mesh.dp.index, self.mesh.dp.size)
        self.engine.eval_batch(batch, self.engine.loss)

    def save(self, folder: Path) -> Checkpoint:
        """Save a checkpoint of the step of `_SAVED`."""
        scale, good_steps = loss_scale_facts(self.engine)
        seed, step = self.config.train.seed, _STEPS[_SAVED] + 1
        facts = Facts(step, 0, seed, None, None, 0, 0, loss_scale=scale, good_steps=good_steps)
        save_checkpoint(folder, facts, checkpoint_tensors(self.engine), {}, self.mesh.world)
        return _checkpoint(folder)

    @property
    def _scale(self) -> float:
        assert self.engine.loss_scale is not None  # it was given one
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
        """Have a gradient of one rank overflow: of the last that holds any."""
        filled = [entry for entry in self.engine.optimizer.entries if entry.gradient.numel()]
        holders = [rank for rank, holds in enumerate(self.mesh.world.gather_objects(bool(filled))) if holds]
        if self.mesh.rank == holders[-1]:
            filled[-1].gradient[(0,) * filled[-1].gradient.dim()] = inf


def _checkpoint(folder: Path) -> Checkpoint:
    path = path_of(folder, _STEPS[_SAVED] + 1)
    return Checkpoint(path, read_manifest(path).facts)

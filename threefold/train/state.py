"""State of a run: what a checkpoint holds of an engine, and the state that the run starts from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from threefold.checkpoint.errors import AVERAGE, MODEL, OPTIMIZER, DamagedCheckpoint
from threefold.checkpoint.folder import SelectedCheckpoint, from_first, newest, stored_config
from threefold.checkpoint.index import weight_names
from threefold.checkpoint.manifest import AnomalyFacts, Checkpoint
from threefold.checkpoint.resume import Resume, consumed_by, continues, find_resumption, find_warm_start
from threefold.checkpoint.tensors import load_tensors, stored_tensors
from threefold.comm.axis import Axis
from threefold.config import Config
from threefold.config.model import CUSTOM
from threefold.data.order import ConsumedSamples, read_by_step
from threefold.doors import call_hook
from threefold.models.sharding import covers, is_of_adapter
from threefold.parallel.running_statistics import stored_buffers
from threefold.random.rng import STREAMS, is_of_process, stored_as
from threefold.train.callbacks.base import RunContext
from threefold.train.step import Engine, GradientStep


@dataclass(frozen=True)
class StartingPoint:
    """State that a run starts from, once its engine holds it.

    Attributes:
        step: number of updates made.
        consumed: training samples consumed before each step from here on.
        lines: lines to print about the choice.
        resumed: the run's own checkpoint that it resumes from; None if there is none.
        carried: checkpoint whose sidecar files the run's own checkpoints get; on the first rank alone.
        skipped: folders of damaged checkpoints that were passed over.
        anomalies: record of the run's bad steps.
        is_unsaved: whether the state is newer than every checkpoint.
    """

    step: int
    consumed: ConsumedSamples
    lines: list[str]
    resumed: Checkpoint | None = None
    carried: Checkpoint | None = None
    skipped: frozenset[Path] = frozenset()
    anomalies: AnomalyFacts | None = None
    is_unsaved: bool = False


class KeptStates(Protocol):
    """States of this rank that earlier attempts of the run kept outside of checkpoints."""

    def newest(self, world: Axis) -> int | None:
        """Return the newest step whose state every rank holds whole; None if there is none. Collective."""

    def restore(self, step: int, engine: Engine, run_dir: Path, is_unsaved: bool, lines: list[str]) -> StartingPoint:
        """Fill the engine with the state after `step` updates; `lines` will be printed."""


def kept_states(files: Sequence[Path], config: Config) -> KeptStates | None:
    """Return the states that these files of this rank hold; None without files, or without a room that reads them."""
    kept: KeptStates | None = call_hook("kept_states", files, config) if files else None
    return kept


class Start:
    """Choice of a run's starting point, made on rank 0 for all ranks. Collective over the world.

    States in memory (`kept`) are used if no checkpoint is newer. Raises a `UserError` on every rank if no checkpoint
    fits the config.
    """

    def __init__(self, run: RunContext, resume: Resume, kept: KeptStates | None, remote: Any) -> None:
        self._run, self._resume, self._kept, self._remote = run, resume, kept, remote
        self._damaged: dict[Path, str] = {}
        self._replaced: set[Path] = set()  # damaged checkpoints that a copy has replaced
        self._in_memory, saved = None if kept is None else kept.newest(run.mesh.world), -1
        if self._in_memory is not None:
            saved = from_first(run.mesh.world, lambda: found.step if (found := newest(run.run_dir)) else -1)
            if saved > self._in_memory:
                self._in_memory = None
        self._is_unsaved = self._in_memory is not None and saved < self._in_memory
        self._found = self._find() if self._in_memory is None else None

    def load(self, engine: Engine) -> StartingPoint:
        """Load the starting point into the engine. All ranks skip a checkpoint that any rank finds damaged.

        Raises a `UserError` on every rank if no checkpoint can be read.
        """
        lines = self._run.attempt.lines
        if self._kept is not None and self._in_memory is not None:
            said = lines(f"Resuming from memory after step {self._in_memory:,}")
            return self._kept.restore(self._in_memory, engine, self._run.run_dir, self._is_unsaved, said)
        while (found := self._found) is not None:
            try:
                if found.is_resumed:
                    restore_engine(engine, found.checkpoint)
                else:
                    load_weights(engine, found.checkpoint, bool(self._run.config.train.init_average))
                break
            except DamagedCheckpoint as damage:
                self._damaged[damage.path] = damage.reason
                self._found = self._find()
        new = ConsumedSamples(read_by_step(self._run.config))
        if found is None:
            return StartingPoint(0, new, lines(""))
        checkpoint = found.checkpoint
        if not found.is_resumed:
            return StartingPoint(
                0, new, [*lines(f"Starting from {checkpoint.path}"), *found.warnings], carried=checkpoint
            )
        after = f" after step {checkpoint.step:,}" if self._run.attempt.number else ""
        said = [*lines(f"Resuming from {checkpoint.path}{after}"), *found.warnings]
        consumed, skipped = consumed_by(checkpoint, self._run.config), frozenset(found.skipped)
        return StartingPoint(
            checkpoint.step, consumed, said, checkpoint, checkpoint, skipped, checkpoint.facts.anomalies
        )

    def _find(self) -> SelectedCheckpoint | None:
        def find() -> SelectedCheckpoint | None:
            if continues(self._run.run_dir, self._resume):
                lines = self._ask_remote()
                found = find_resumption(self._run.run_dir, self._run.config, self._damaged)
                return replace(found, warnings=(*lines, *found.warnings))
            return find_warm_start(self._run.config, self._damaged)

        return from_first(self._run.mesh.world, find)

    def _ask_remote(self) -> tuple[str, ...]:
        """Have a copy at `checkpoint.remote` replace a checkpoint that loading found damaged; return lines about it."""
        if self._remote is None or not self._damaged.keys() - self._replaced:
            return ()
        copy, lines = self._remote.replace_damaged(self._damaged)
        if copy is not None and copy not in self._replaced:
            self._damaged.pop(copy, None)
            self._replaced.add(copy)
        return lines


def model_tensors(engine: GradientStep) -> dict[str, Tensor]:
    """Return master weights and persistent buffers by their names in the unsplit model, sharing memory."""
    weights = {MODEL + weight.name: weight.stored(weight.master.detach()) for weight in engine.model.weights}
    return weights | {MODEL + name: buffer for name, buffer in stored_buffers(engine.stages).items()}


def engine_tensors(engine: Engine, thawed: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return weights, buffers, optimizer state and averages by their names in the unsplit model, sharing memory.

    Tied embeddings on two stages have the same name and value on both, so they are stored once. The state of weights
    that patterns of `thawed` include is left out.
    """
    tensors, rule = model_tensors(engine), engine.optimizer.rule
    for entry in engine.optimizer.entries:
        if any(covers(pattern, entry.name) for pattern in thawed):
            continue
        for state, value in rule.state(entry).items():
            whole = value if rule.is_replicated(entry, state, value) else entry.stored(value)
            tensors[f"{OPTIMIZER}{entry.name}.{state}"] = whole
    return tensors | {AVERAGE + entry.name: entry.stored(average) for entry, average in engine.optimizer.averages()}


def checkpoint_tensors(engine: Engine) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint: `engine_tensors`, and the states of the random streams drawn from.

    For a custom model, these include the generators of the process.
    """
    sizes = engine.mesh.layout.shape
    drawn = engine.streams.stored(sizes) if engine.streams.used else {}
    if engine.config.model.architecture == CUSTOM:
        drawn |= engine.generators.stored(sizes)
    return engine_tensors(engine) | drawn


def loss_scale_facts(engine: Engine) -> tuple[float | None, int]:
    scale = engine.loss_scale
    return (scale.value, scale.good_steps) if scale else (None, 0)


def restore_engine(engine: Engine, checkpoint: Checkpoint) -> None:
    """Load a checkpoint of any layout into an engine: weights, optimizer state, loss scale, streams and generators.

    Raises:
        DamagedCheckpoint: on every rank, if a checksum differs, or in an exact run the fingerprint of the weights; the
            engine's state is undefined then.
        UserError: on every rank, if the checkpoint cannot be read.
    """
    stored, tensors = stored_tensors(checkpoint.path), engine_tensors(engine, _thawed(engine, checkpoint))
    found = {name: tensor for name, tensor in tensors.items() if name in stored or not name.startswith(AVERAGE)}
    load_tensors(found, checkpoint.path, engine.mesh.world)
    written = checkpoint.facts.fingerprint
    now = None if written is None else engine.fingerprint(checkpoint.step)
    if now not in (None, written):
        reason = f"its weights have the fingerprint {now} in this layout, and {written} when it was written"
        raise DamagedCheckpoint(checkpoint.path, reason)
    engine.optimizer.restored([name.removeprefix(AVERAGE) for name in found if name.startswith(AVERAGE)])
    restore_loss_scale(engine, checkpoint.facts.loss_scale, checkpoint.facts.good_steps)
    names = {name for name in stored if name.startswith(STREAMS)}
    if any(name.startswith(stored_as(engine.mesh.layout.shape)) for name in names):
        mine = {name: state for name, state in random_states(engine).items() if name in names}
        load_tensors(mine, checkpoint.path, engine.mesh.world)
        restore_random_states(engine, mine)
        return
    # In another layout, random streams and generators start again from the seed and the step.
    of_process = {name for name in names if is_of_process(name)}
    if names - of_process:
        engine.streams.reseed("after", checkpoint.step)
    if of_process:
        engine.generators.reseed(engine.settings.seed, "after", checkpoint.step)


def _thawed(engine: Engine, checkpoint: Checkpoint) -> Sequence[str]:
    """Return the patterns that a checkpoint froze if it lacks the optimizer state of a weight that is trained now."""
    known = {name.removeprefix(OPTIMIZER).rpartition(".")[0] for name in stored_tensors(checkpoint.path)}
    if known.issuperset(entry.name for entry in engine.optimizer.entries):
        return ()
    return stored_config(checkpoint.path).optimizer.frozen or ()


def restore_loss_scale(engine: Engine, value: float | None, good_steps: int) -> None:
    """Set the loss scale from `loss_scale_facts`, of a run that may have had none."""
    if engine.loss_scale is not None and value is not None:
        engine.loss_scale.value, engine.loss_scale.good_steps = value, good_steps


def random_states(engine: Engine) -> dict[str, Tensor]:
    """Return tensors to fill with the states of this rank's random streams and generators, by stored name."""
    shape = engine.mesh.layout.shape
    return engine.streams.stored(shape) | engine.generators.places(shape)


def restore_random_states(engine: Engine, states: Mapping[str, Tensor]) -> None:
    """Continue from `states`, which are those of `random_states` that a checkpoint has filled."""
    shape = engine.mesh.layout.shape
    if drawn := {name: state for name, state in states.items() if not is_of_process(name)}:
        engine.streams.load_stored(drawn, shape)  # otherwise this rank's stage never drew
    engine.generators.load_stored(states, shape)


def load_weights(engine: Engine, checkpoint: Checkpoint, average: bool = False) -> None:
    """Warm-start from another run's weights, or from their `average`, each rank reading its shards.

    Raises like `restore_engine`. Adapters begin with their initial values if that run had none.
    """
    tensors, stored = model_tensors(engine), stored_tensors(checkpoint.path)
    if not any(map(is_of_adapter, stored)):
        tensors = {name: tensor for name, tensor in tensors.items() if not is_of_adapter(name)}
    names = weight_names(checkpoint.path, True) if average else {}
    tensors = {names.get(name.removeprefix(MODEL), name): tensor for name, tensor in tensors.items()}
    load_tensors(tensors, checkpoint.path, engine.mesh.world)
    engine.optimizer.restored(())

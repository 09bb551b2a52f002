"""State of a run: the tensors that a checkpoint holds, and how an engine is filled from one."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from threefold.checkpoint.errors import MODEL, OPTIMIZER
from threefold.checkpoint.folder import Checkpoint
from threefold.checkpoint.tensors import load_tensors, stored_names
from threefold.config.model import OWN
from threefold.parallel.moving_buffers import stored_buffers
from threefold.random.rng import STREAMS, is_of_process, stored_as
from threefold.train.step import Engine


def model_tensors(engine: Engine) -> dict[str, Tensor]:
    """Return master weights and persistent buffers by their names in the unsplit model, sharing memory."""
    weights = {MODEL + weight.name: weight.stored(weight.master.detach()) for weight in engine.model.weights}
    return weights | {MODEL + name: buffer for name, buffer in stored_buffers(engine.stages).items()}


def engine_tensors(engine: Engine) -> dict[str, Tensor]:
    """Return weights, buffers and optimizer state by their names in the unsplit model, sharing memory.

    Tied embeddings on two stages have the same name and value on both, so they are stored once.
    """
    tensors = model_tensors(engine)
    for name, state, value in engine.optimizer.stored_states():
        tensors[f"{OPTIMIZER}{name}.{state}"] = value
    return tensors


def checkpoint_tensors(engine: Engine) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint: `engine_tensors`, and the states of the random streams drawn from.

    For the user's own model, these include the generators of the process.
    """
    sizes = engine.mesh.layout.shape
    drawn = engine.streams.stored(sizes) if engine.streams.used else {}
    if engine.config.model.architecture == OWN:
        drawn |= engine.generators.stored(sizes)
    return engine_tensors(engine) | drawn


def loss_scale_facts(engine: Engine) -> tuple[float | None, int]:
    """Return `loss_scale` and `good_steps` for the facts of a checkpoint."""
    scale = engine.loss_scale
    return (scale.value, scale.good_steps) if scale else (None, 0)


def restore_engine(engine: Engine, checkpoint: Checkpoint) -> None:
    """Load a checkpoint of any layout into an engine: weights, optimizer state, loss scale, streams and generators.

    Raises:
        DamagedCheckpoint: on every rank, if a checksum differs; the engine's state is undefined then.
        UserError: on every rank, if the checkpoint cannot be read.
    """
    _load(engine, engine_tensors(engine), checkpoint.path)
    engine.optimizer.restored()
    facts, scale = checkpoint.facts, engine.loss_scale
    if scale is not None and facts.loss_scale is not None:
        scale.value, scale.good_steps = facts.loss_scale, facts.good_steps
    _restore_streams(engine, checkpoint)


def load_weights(engine: Engine, checkpoint: Checkpoint) -> None:
    """Warm-start from another run's weights, each rank reading its shards; raises like `restore_engine`."""
    _load(engine, model_tensors(engine), checkpoint.path)
    engine.optimizer.restored()


def _load(engine: Engine, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Fill tensors; buffers missing from a checkpoint of an older version keep the constructor's values."""
    lacking = {MODEL + name for name in stored_buffers(engine.stages)} - stored_names(path)
    wanted = {name: tensor for name, tensor in tensors.items() if name not in lacking}
    load_tensors(wanted, path, engine.mesh.world)


def _restore_streams(engine: Engine, checkpoint: Checkpoint) -> None:
    """Restore this rank's random streams and generators; in another layout, reseed them from the seed and the step."""
    layout = engine.mesh.layout
    names = {name for name in stored_names(checkpoint.path) if name.startswith(STREAMS)}
    if any(name.startswith(stored_as(layout.shape)) for name in names):
        streams, generators = engine.streams.stored(layout.shape), engine.generators.places(layout.shape)
        mine = {name: state for name, state in (streams | generators).items() if name in names}
        load_tensors(mine, checkpoint.path, engine.mesh.world)
        if drawn := {name: state for name, state in mine.items() if name in streams}:
            engine.streams.load_stored(drawn, layout.shape)  # otherwise this rank's stage never drew
        engine.generators.load_stored(mine, layout.shape)
        return
    of_process = {name for name in names if is_of_process(name)}
    if names - of_process:
        engine.streams.reseed("after", checkpoint.step)
    if of_process:
        engine.generators.reseed(engine.settings.seed, "after", checkpoint.step)

"""`save` and `load`: checkpoints of a loop of one's own, in the format of all others, which opens in every layout."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from threefold.api.model import DistributedModel
from threefold.api.optimizer import ModelOptimizer
from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import newest
from threefold.checkpoint.manifest import Facts
from threefold.checkpoint.save import save_checkpoint
from threefold.checkpoint.selection import from_first
from threefold.checkpoint.tensor_names import MODEL, OPTIMIZER
from threefold.checkpoint.tensors import load_tensors, stored_tensors
from threefold.errors import UserError
from threefold.files import parse_json, read_text
from threefold.parallel.parameter import like

if TYPE_CHECKING:
    from threefold.data.map_dataset import DataLoader

LOOP = "loop.json"
"""The file of a checkpoint that has the state of a loop besides its tensors."""


def save(
    folder: str | Path,
    step: int,
    *,
    model: DistributedModel,
    optimizer: ModelOptimizer | None = None,
    loader: "DataLoader | None" = None,
) -> Path:
    """Write a checkpoint as `FOLDER/checkpoints/step_00000100`: complete or not at all.

    It has global tensors under the names of the unsplit model. Collective over the world.

    Args:
        folder: shared by all ranks; made where it is missing.
        step: of the loop; names the checkpoint.
        model: whose weights it has, in the dtype that they are updated in.
        optimizer: whose state it has, and the options of its groups, such as the learning rate.
        loader: whose place in the data it has.

    Returns:
        the checkpoint's folder.

    Raises:
        UserError: on every rank, when it cannot be written, or the model draws from random streams.

    Example:
        >>> threefold.save("ckpt", step, model=model, optimizer=optimizer, loader=loader)
    """
    _check(model, optimizer, loader)
    if not isinstance(step, int) or step < 0:
        raise UserError(f"step is {step!r} but must be a whole number of at least 0; use 0.")
    if model.gradient_step.streams.used:
        raise UserError(
            "The model draws from random streams in sequence, which threefold.save does not keep; use keys."
        )
    run_dir, world = Path(folder), model.mesh.world
    if world.is_first:
        run_dir.mkdir(parents=True, exist_ok=True)
    world.barrier()
    tensors = _weights(model)
    if optimizer is not None:
        for entry in optimizer.entries:
            for name, value in optimizer.states(entry).items():
                stored = entry.stored(value) if value.shape == entry.master.shape else value
                tensors[f"{OPTIMIZER}{entry.name}.{name}"] = stored
    state = {
        "updates": model.updates,
        "loader": None if loader is None else loader.state_dict(),
        "groups": None if optimizer is None else [_options(group) for group in optimizer.param_groups],
    }
    consumed = 0 if loader is None else loader.consumed_samples
    seed = model.gradient_step.settings.seed
    facts = Facts(step, consumed, seed, eod=None, tokenizer_sha256=None, tokens=0, documents=0)
    return save_checkpoint(run_dir, facts, tensors, {LOOP: json.dumps(state, indent=2)}, world)


def load(
    folder: str | Path,
    *,
    model: DistributedModel,
    optimizer: ModelOptimizer | None = None,
    loader: "DataLoader | None" = None,
) -> int:
    """Load the newest complete checkpoint of a folder, which any layout may have saved.

    Collective over the world. Each rank reads its own shards only.

    Args:
        folder: as `save` was given it.
        model, optimizer, loader: what to fill; what is left out stays as it is.

    Returns:
        the step that the checkpoint was saved with.

    Raises:
        UserError: on every rank: there is no checkpoint, or it is of another model, optimizer or data set.

    Example:
        >>> step = threefold.load("ckpt", model=model, optimizer=optimizer, loader=loader)
    """
    _check(model, optimizer, loader)

    def find() -> tuple[Path, int, dict[str, Any]]:
        found = newest(Path(folder))
        if found is None:
            raise UserError(f"{folder} has no complete checkpoint; save one with threefold.save().")
        text = read_text(found.path / LOOP) if (found.path / LOOP).exists() else "{}"
        return found.path, found.step, parse_json(text, LOOP)

    path, step, state = from_first(model.mesh.world, find)
    try:
        load_tensors(_weights(model), path)
        if optimizer is not None:
            _load_states(optimizer, path, state.get("groups"))
    except DamagedCheckpoint as damage:
        raise UserError(f"{damage.path} is damaged: {damage.reason}; remove it to load the one before it.") from None
    if loader is not None:
        if state.get("loader") is None:
            raise UserError(f"{path} has no place in the data; save it with loader=, or load it without.")
        loader.load_state_dict(state["loader"])
    model.publish()
    model.updated(int(state.get("updates", 0)))
    return step


def _check(model: Any, optimizer: Any, loader: Any) -> None:
    if not isinstance(model, DistributedModel):
        raise UserError(f"model is a {type(model).__name__} but must be one of threefold.parallelize(); give that.")
    if optimizer is not None and not isinstance(optimizer, ModelOptimizer):
        raise UserError(
            f"optimizer is a {type(optimizer).__name__} but must be of threefold.distributed_optimizer(); give that."
        )
    if optimizer is not None and optimizer.model is not model:
        raise UserError("optimizer is of another model; give the model that it was made with.")
    if loader is not None and not hasattr(loader, "consumed_samples"):
        raise UserError(f"loader is a {type(loader).__name__} but must be a threefold.DataLoader; give that.")


def _weights(model: DistributedModel) -> dict[str, Tensor]:
    """The weights under their stored names, sharing memory."""
    weights = model.gradient_step.model.weights
    return {MODEL + weight.name: like(weight.parameter, weight.master.detach()) for weight in weights}


def _load_states(optimizer: ModelOptimizer, path: Path, groups: list[dict[str, Any]] | None) -> None:
    """Fill the state of an optimizer, also of one that has made no step yet.

    Raises:
        UserError: the checkpoint is of another optimizer, or has none.
    """
    stored = {name: found for name, found in stored_tensors(path).items() if name.startswith(OPTIMIZER)}
    if groups is None:
        raise UserError(f"{path} has no optimizer state; save it with optimizer=, or load it without.")
    if len(groups) != len(optimizer.param_groups):
        raise UserError(
            f"{path} has {len(groups)} groups of parameters but the optimizer has {len(optimizer.param_groups)}; make "
            "it with the same groups."
        )
    wanted: dict[str, Tensor] = {}
    for entry in optimizer.entries:
        state: dict[str, Tensor] = {}
        prefix = f"{OPTIMIZER}{entry.name}."
        for name, (shape, dtype) in stored.items():
            if not name.startswith(prefix) or "." in name.removeprefix(prefix):
                continue
            if shape == tuple(entry.parameter.shape):
                shard = torch.zeros_like(entry.master, dtype=dtype, requires_grad=False)
                wanted[name] = entry.stored(shard)
            else:
                wanted[name] = shard = torch.zeros(shape, dtype=dtype)
            state[name.removeprefix(prefix)] = shard
        optimizer.optimizer.state[entry.master] = state
    load_tensors(wanted, path)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(saved)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group of parameters is updated with, as JSON has it."""
    plain = (bool, int, float, str, type(None))
    found = {name: value for name, value in group.items() if isinstance(value, plain)}
    pairs = {name: list(value) for name, value in group.items() if name != "params" and isinstance(value, tuple | list)}
    return found | {name: value for name, value in pairs.items() if all(isinstance(each, plain) for each in value)}

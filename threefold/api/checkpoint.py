"""Checkpoints of custom training loops (`save`, `load`), in the common format that any layout can read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from threefold.api.model import DistributedModel
from threefold.api.model_optimizer import ModelOptimizer
from threefold.api.prepared_model import PreparedModule
from threefold.api.prepared_optimizer import PreparedOptimizer
from threefold.checkpoint.errors import MODEL, OPTIMIZER, DamagedCheckpoint
from threefold.checkpoint.folder import LOOP, from_first, newest
from threefold.checkpoint.manifest import WRITER, Facts, record_of
from threefold.checkpoint.save import save_checkpoint
from threefold.checkpoint.tensors import load_tensors, stored_tensors
from threefold.errors import UserError, require_whole
from threefold.files import parse_json
from threefold.foreign import FolderFiles
from threefold.parallel.leaf import like, local, stored
from threefold.parallel.moving_buffers import stored_buffers
from threefold.train.update_rule import LossScale

if TYPE_CHECKING:
    from threefold.data.map_dataset import DistributedDataLoader

_NUMBERS = {"bool": bool, "int": int, "float": float}


def save(
    folder: str | Path,
    step: int,
    *,
    model: DistributedModel | PreparedModule,
    optimizer: ModelOptimizer | PreparedOptimizer | None = None,
    loader: "DistributedDataLoader | None" = None,
) -> Path:
    """Write a checkpoint atomically to `FOLDER/checkpoints/step_00000100`.

    It contains global tensors under the names of the unsharded model, and no config: `load` opens it, while commands
    that need a config (`generate`, `eval`, `train --resume`, `checkpoint export`) refuse it. Collective over the world.

    Args:
        folder: folder shared by all ranks; created if missing.
        step: step of the loop; names the checkpoint.
        model: model from `parallelize`, saved with its persistent buffers and its weights in the dtype of the update;
            or from `prepare`, saved with its buffers.
        optimizer: optimizer from `distributed_optimizer` or `prepare`, saved with its state and the options of its
            groups, such as the learning rate.
        loader: a `threefold.DistributedDataLoader`, whose position in the data is saved.

    Returns:
        the checkpoint's folder.

    Raises:
        UserError: on every rank, if the checkpoint cannot be written, or the model draws from random streams.

    Example:
        >>> threefold.save("ckpt", step, model=model, optimizer=optimizer, loader=loader)
    """
    _check(model, optimizer, loader)
    require_whole("step", step, least=0)
    run_dir, world, seed = Path(folder), model.mesh.world, 0
    weights, buffers = _stored(model)
    tensors = weights | buffers
    state: dict[str, Any] = {"loader": None if loader is None else loader.state_dict(), "groups": None}
    if isinstance(model, DistributedModel):
        if model.gradient_step.streams.used:
            raise UserError(
                "The model draws from random streams in sequence, which threefold.save does not keep; use keys."
            )
        state["updates"], seed = model.updates, model.gradient_step.settings.seed
    if (scale := _loss_scale(model)) is not None:
        state["loss_scale"] = [scale.value, scale.good_steps]
    if optimizer is not None:
        state["groups"] = [_options(group) for group in optimizer.param_groups]
        numbers: dict[str, str] = {}
        for weight, name, value, tensor in list(optimizer.states()):
            if not isinstance(value, Tensor) and type(value).__name__ in _NUMBERS:
                numbers[f"{weight}.{name}"] = type(value).__name__
            tensors[f"{OPTIMIZER}{weight}.{name}"] = tensor.detach()
        state["numbers"] = {name: kind for part in world.gather_objects(numbers) for name, kind in part.items()}
    if world.is_first:
        run_dir.mkdir(parents=True, exist_ok=True)
    world.barrier()
    consumed = 0 if loader is None else loader.consumed_samples
    facts = Facts(step, consumed, seed, eod=None, tokenizer_sha256=None, tokens=0, documents=0)
    texts = {LOOP: json.dumps(state, indent=2), WRITER: record_of(model.mesh.layout).text}
    return save_checkpoint(run_dir, facts, tensors, texts, world)


def load(
    folder: str | Path,
    *,
    model: DistributedModel | PreparedModule,
    optimizer: ModelOptimizer | PreparedOptimizer | None = None,
    loader: "DistributedDataLoader | None" = None,
) -> int:
    """Load the newest complete checkpoint of a folder and return its step; any layout may have saved it.

    Collective over the world. Each rank reads only its own shards.

    Args:
        folder: folder that was passed to `save`.
        model, optimizer, loader: objects to fill; those left out stay unchanged.

    Returns:
        the step of the checkpoint.

    Raises:
        UserError: on every rank, if there is no checkpoint, or it belongs to another model, optimizer or data set.

    Example:
        >>> step = threefold.load("ckpt", model=model, optimizer=optimizer, loader=loader)
    """
    _check(model, optimizer, loader)

    def find() -> tuple[Path, int, dict[str, Any]]:
        found = newest(Path(folder))
        if found is None:
            raise UserError(f"{folder} has no complete checkpoint; save one with threefold.save().")
        files = FolderFiles(found.path)
        text = files.text(LOOP) if files.holds(LOOP) else "{}"
        return found.path, found.step, parse_json(text, LOOP)

    path, step, state = from_first(model.mesh.world, find)
    try:
        weights, buffers = _stored(model)
        load_tensors(weights | buffers, path)
        if optimizer is not None:
            _load_states(optimizer, path, state)
    except DamagedCheckpoint as damage:
        raise UserError(f"{damage.path} is damaged: {damage.reason}; remove it to load the one before it.") from None
    if loader is not None:
        if state.get("loader") is None:
            raise UserError(f"{path} has no place in the data; save it with loader=, or load it without.")
        loader.load_state_dict(state["loader"])
    scale, saved = _loss_scale(model), state.get("loss_scale")
    if scale is not None and saved is not None:
        scale.value, scale.good_steps = float(saved[0]), int(saved[1])
    if isinstance(model, DistributedModel):
        model.publish()
        model.updates, model.has_gradients = int(state.get("updates", 0)), False
    else:
        model.sync.gradients.weights_changed()
    return step


def _check(model: Any, optimizer: Any, loader: Any) -> None:
    if not isinstance(model, DistributedModel | PreparedModule):
        raise UserError(f"model is a {type(model).__name__} but must be one of threefold.parallelize(); give that.")
    prepared_model = isinstance(model, PreparedModule)
    if optimizer is not None and not isinstance(optimizer, PreparedOptimizer if prepared_model else ModelOptimizer):
        made_by = "prepare" if prepared_model else "distributed_optimizer"
        raise UserError(f"optimizer is a {type(optimizer).__name__} but must be of threefold.{made_by}(); give that.")
    of = getattr(optimizer, "sync" if prepared_model else "model", None)
    if of is not None and of is not (model.sync if isinstance(model, PreparedModule) else model):
        raise UserError("optimizer is of another model; give the model that it was made with.")
    if loader is not None and not hasattr(loader, "consumed_samples"):
        raise UserError(
            f"loader is a {type(loader).__name__} but must be a threefold.DistributedDataLoader; give that."
        )


def _loss_scale(model: DistributedModel | PreparedModule) -> LossScale | None:
    return model.loss_scale if isinstance(model, DistributedModel) else model.sync.loss_scale


def _stored(model: DistributedModel | PreparedModule) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights and persistent buffers under their stored names, as global tensors that share memory."""
    if isinstance(model, DistributedModel):
        weights = model.gradient_step.model.weights
        found = {MODEL + weight.name: like(weight.parameter, weight.master.detach()) for weight in weights}
        buffers = stored_buffers(model.gradient_step.stages)
        return found, {MODEL + name: buffer for name, buffer in buffers.items()}
    found = {}
    seen: set[int] = set()
    for name, value in model.module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor) or id(value) in seen:  # keep a tied weight once
            continue
        seen.add(id(value))
        if isinstance(value, nn.Parameter):
            whole = stored(value)
            found[MODEL + name] = like(whole, local(whole).detach())
        else:
            found[MODEL + name] = value.detach()
    return found, {}


def _load_states(optimizer: ModelOptimizer | PreparedOptimizer, path: Path, state: Mapping[str, Any]) -> None:
    """Fill an optimizer's state, even before its first step; raise UserError if the checkpoint's state does not fit."""
    groups: list[dict[str, Any]] | None = state.get("groups")
    if groups is None:
        raise UserError(f"{path} has no optimizer state; save it with optimizer=, or load it without.")
    if len(groups) != len(optimizer.param_groups):
        raise UserError(
            f"{path} has {len(groups)} groups of parameters but the optimizer has {len(optimizer.param_groups)}; make "
            "it with the same groups."
        )
    index = {name: found for name, found in stored_tensors(path).items() if name.startswith(OPTIMIZER)}
    kinds: Mapping[str, str] = state.get("numbers") or {}
    wanted: dict[str, Tensor] = {}
    shards: dict[str, dict[str, Tensor]] = {}
    others: dict[str, dict[str, Any]] = {}
    for name, parameter, master in optimizer.parts():
        shards[name], others[name] = {}, {}
        prefix = f"{OPTIMIZER}{name}."
        for stored_name, (shape, dtype) in index.items():
            key = stored_name.removeprefix(prefix)
            if key == stored_name or "." in key:
                continue
            if shape == tuple(parameter.shape) and master is not None:
                shards[name][key] = torch.zeros_like(master, dtype=dtype, requires_grad=False)
                wanted[stored_name] = like(parameter, shards[name][key])
            else:
                wanted[stored_name] = others[name][key] = torch.zeros(shape, dtype=dtype)
    load_tensors(wanted, path)
    for name, values in others.items():
        for key, value in values.items():
            if kind := kinds.get(f"{name}.{key}"):
                values[key] = _NUMBERS[kind](value.item())
    optimizer.fill_states(shards, others)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(saved)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group that JSON can represent."""
    plain = (bool, int, float, str, type(None))
    found = {name: value for name, value in group.items() if isinstance(value, plain)}
    pairs = {name: list(value) for name, value in group.items() if name != "params" and isinstance(value, tuple | list)}
    return found | {name: value for name, value in pairs.items() if all(isinstance(each, plain) for each in value)}

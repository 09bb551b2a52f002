"""Checkpoints of custom training loops (`save`, `load`), in the common format that any layout can read."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from threefold.checkpoint.errors import OPTIMIZER, DamagedCheckpoint
from threefold.checkpoint.folder import LOOP, from_first, newest
from threefold.checkpoint.manifest import WRITER, Facts, record_of
from threefold.checkpoint.save import save_checkpoint
from threefold.checkpoint.tensors import load_tensors, stored_tensors
from threefold.comm.mesh import Mesh
from threefold.errors import UserError, require_whole
from threefold.files import parse_json
from threefold.foreign import FolderFiles
from threefold.parallel.leaf import like
from threefold.train.gradient_update import LossScale

_NUMBERS = {"bool": bool, "int": int, "float": float}


@dataclass(frozen=True)
class LoopState:
    """State of a model between the steps of a custom loop.

    Attributes:
        tensors: weights, in the dtype of the update, and persistent buffers, by their names in a checkpoint; global
            tensors that share memory with the model.
        optimizers: name of the function that makes its optimizers.
        facts: further facts of the model, which JSON can represent.
        seed: seed of its random numbers; 0 if it has none.
        refusal: why no checkpoint can hold the state; empty if one can.
    """

    mesh: Mesh
    tensors: dict[str, Tensor]
    loss_scale: LossScale | None
    optimizers: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    refusal: str = ""


class LoopModel:
    """Base class of models that `save` and `load` take."""

    def loop_state(self) -> LoopState:
        """Return the state to save, or to fill."""
        raise NotImplementedError

    def loop_state_filled(self, facts: Mapping[str, Any]) -> None:
        """Take over the tensors of `loop_state`, which a checkpoint has filled, and its facts."""
        raise NotImplementedError


class LoopOptimizer:
    """Base class of optimizers that `save` and `load` take; `made_by` is the function that makes it of a model."""

    made_by: ClassVar[str]
    param_groups: list[dict[str, Any]]

    def is_of(self, model: LoopModel) -> bool:
        """Return whether it updates this model."""
        raise NotImplementedError

    def parts(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yield the name of each trained weight, the weight, and this rank's shard of it; None for whole states."""
        raise NotImplementedError

    def states(self) -> Iterator[tuple[str, str, Any, Tensor]]:
        """Yield the optimizer state: weight name, state name, value, and the value as a global tensor. Collective."""
        raise NotImplementedError

    def fill_states(self, shards: Mapping[str, Mapping[str, Tensor]], others: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the optimizer state of each trained weight. Collective over the ranks that shard it.

        Args:
            shards: weight name → state name → this rank's part of a state that has the weight's shape.
            others: weight name → state name → number, or tensor that is equal on all ranks.
        """
        raise NotImplementedError


class LoopLoader(Protocol):
    """Loader whose position `save` and `load` take, such as `threefold.DistributedDataLoader`."""

    @property
    def consumed_samples(self) -> int: ...

    def state_dict(self) -> dict[str, int]: ...

    def load_state_dict(self, state: Mapping[str, int]) -> None: ...


def save(
    folder: str | Path,
    step: int,
    *,
    model: LoopModel,
    optimizer: LoopOptimizer | None = None,
    loader: LoopLoader | None = None,
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
    held = _checked(model, optimizer, loader)
    require_whole("step", step, least=0)
    run_dir, world, tensors = Path(folder), held.mesh.world, held.tensors
    if held.refusal:
        raise UserError(held.refusal)
    state: dict[str, Any] = {"loader": None if loader is None else loader.state_dict(), "groups": None, **held.facts}
    if (scale := held.loss_scale) is not None:
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
    facts = Facts(step, consumed, held.seed, eod=None, tokenizer_sha256=None, tokens=0, documents=0)
    texts = {LOOP: json.dumps(state, indent=2), WRITER: record_of(held.mesh.layout).text}
    return save_checkpoint(run_dir, facts, tensors, texts, world)


def load(
    folder: str | Path,
    *,
    model: LoopModel,
    optimizer: LoopOptimizer | None = None,
    loader: LoopLoader | None = None,
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
    held = _checked(model, optimizer, loader)

    def find() -> tuple[Path, int, dict[str, Any]]:
        found = newest(Path(folder))
        if found is None:
            raise UserError(f"{folder} has no complete checkpoint; save one with threefold.save().")
        files = FolderFiles(found.path)
        text = files.text(LOOP) if files.holds(LOOP) else "{}"
        return found.path, found.step, parse_json(text, LOOP)

    path, step, state = from_first(held.mesh.world, find)
    try:
        load_tensors(held.tensors, path)
        if optimizer is not None:
            _load_states(optimizer, path, state)
    except DamagedCheckpoint as damage:
        raise UserError(f"{damage.path} is damaged: {damage.reason}; remove it to load the one before it.") from None
    if loader is not None:
        if state.get("loader") is None:
            raise UserError(f"{path} has no place in the data; save it with loader=, or load it without.")
        loader.load_state_dict(state["loader"])
    scale, saved = held.loss_scale, state.get("loss_scale")
    if scale is not None and saved is not None:
        scale.value, scale.good_steps = float(saved[0]), int(saved[1])
    model.loop_state_filled(state)
    return step


def _checked(model: Any, optimizer: Any, loader: Any) -> LoopState:
    """Return the state of the model; raise a `UserError` unless the objects are of this package and belong together."""
    if not isinstance(model, LoopModel):
        raise UserError(f"model is a {type(model).__name__} but must be one of threefold.parallelize(); give that.")
    state = model.loop_state()
    if optimizer is not None and getattr(optimizer, "made_by", "") != state.optimizers:
        raise UserError(
            f"optimizer is a {type(optimizer).__name__} but must be of threefold.{state.optimizers}(); give that."
        )
    if optimizer is not None and not optimizer.is_of(model):
        raise UserError("optimizer is of another model; give the model that it was made with.")
    if loader is not None and not hasattr(loader, "consumed_samples"):
        raise UserError(
            f"loader is a {type(loader).__name__} but must be a threefold.DistributedDataLoader; give that."
        )
    return state


def _load_states(optimizer: LoopOptimizer, path: Path, state: Mapping[str, Any]) -> None:
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

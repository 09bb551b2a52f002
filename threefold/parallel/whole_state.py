"""State and outputs of a sharded model as one process has them: whole tensors under the names of the unsplit model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threefold.comm.axis import Axis
from threefold.errors import UserError
from threefold.models.custom_batch import map_tensors
from threefold.parallel.parallelize import TrainableModel
from threefold.parallel.parameter import slice_of, whole
from threefold.parallel.running_statistics import stored_buffers


class LoadedKeys(NamedTuple):
    """Result of `load_state_dict`, as in `nn.Module`."""

    missing_keys: list[str]
    unexpected_keys: list[str]

    @classmethod
    def checked(cls, missing: list[str], unexpected: list[str], strict: bool) -> "LoadedKeys":
        """Return the keys; raise UserError if there are any and `strict` is set."""
        if strict and (missing or unexpected):
            what = f"lacks {missing[0]!r}" if missing else f"has {unexpected[0]!r}, which the model does not have"
            raise UserError(f"The state {what}; pass that of the same model, or strict=False.")
        return cls(missing, unexpected)


@torch.no_grad()
def whole_state(model: TrainableModel) -> dict[str, Tensor]:
    """Return the state of the unsplit model on every rank. Collective over the world.

    Its names and their order are those of its `state_dict()`: weights in the dtype of the update, a tied one under each
    of its names, and persistent buffers.
    """
    pp, device = model.parallelism.mesh.pp, model.parallelism.mesh.device
    held = {weight.name: whole(weight.stored(weight.master.detach())) for weight in model.weights}
    held |= stored_buffers(model.stages)
    found: dict[str, Tensor] = {}
    for index, names in enumerate(_held(model)):
        for name, (shape, dtype) in names.items():
            if name not in found:
                mine = pp.index == index
                value = held[name].clone() if mine else torch.empty(shape, dtype=dtype, device=device)
                found[name] = _broadcast_(value, pp, index)
    return {name: found[model.plan.whole_name(name)] for name in model.names}


@torch.no_grad()
def load_whole_state(model: TrainableModel, state: Mapping[str, Any], strict: bool) -> LoadedKeys:
    """Copy this rank's shards of an unsplit model's state, given alike on every rank. Collective over the pp axis.

    Raises:
        UserError: on every rank, if shapes differ, the names of a tied weight have different values, or `strict` is set
            and names are missing or unknown. One name of a tied weight is enough.
    """
    plan, values = model.plan, dict[str, Tensor]()
    shapes = {name: shape for names in _held(model) for name, (shape, _) in names.items()}
    for name in model.names:
        if name not in state:
            continue
        value, stored = state[name], plan.whole_name(name)
        if not isinstance(value, Tensor) or tuple(value.shape) != shapes[stored]:
            what = f"of the shape {[*value.shape]}" if isinstance(value, Tensor) else f"as a {type(value).__name__}"
            raise UserError(
                f"The state has {name!r} {what} but the model's has {[*shapes[stored]]}; pass that of the same model."
            )
        if stored in values and not torch.equal(values[stored], value):
            raise UserError(
                f"The state has two values for {name!r} and {stored!r}, which are one weight of the model; leave one "
                "of them out, with strict=False."
            )
        values[stored] = value
    missing = [name for name in model.names if plan.whole_name(name) not in values]
    loaded = LoadedKeys.checked(missing, [name for name in state if name not in model.names], strict)
    for weight in model.weights:
        if weight.name in values:
            weight.master.detach().copy_(slice_of(weight.parameter, values[weight.name]))
    for name, buffer in stored_buffers(model.stages).items():
        if name in values:
            buffer.copy_(values[name])
    return loaded


def on_all_stages(output: Any, axis: Axis, source: int, device: torch.device) -> Any:
    """Return, on every rank of the pp axis, the tensors in any nesting that its rank `source` has. Collective."""
    mine = axis.index == source
    shape = map_tensors(output, lambda tensor: torch.empty_like(tensor, device="meta")) if mine else None
    shapes = axis.gather_objects(shape)
    given = output if mine else shapes[source]

    def sent(tensor: Tensor) -> Tensor:
        value = tensor.contiguous() if mine else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return _broadcast_(value, axis, source)

    return map_tensors(given, sent)


def _held(model: TrainableModel) -> list[dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Return the whole shape and the dtype of each tensor that a rank's stages store, for each rank of the pp axis."""
    held = {weight.name: (tuple(weight.parameter.shape), weight.master.dtype) for weight in model.weights}
    held |= {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in stored_buffers(model.stages).items()}
    return model.parallelism.mesh.pp.gather_objects(held)


def _broadcast_(tensor: Tensor, axis: Axis, source: int) -> Tensor:
    """Broadcast a contiguous tensor of any dtype, in place, as bytes: not every backend sends every dtype."""
    axis.broadcast_(tensor.reshape(-1).view(torch.uint8), source)
    return tensor

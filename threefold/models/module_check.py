"""Checks of a user's model, made on the meta device, for what would not be trained as one process trains it."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from threefold.errors import UserError
from threefold.torch_private.tensors import has_gradient_hooks, has_module_hooks, storage_key

_MOST_ELEMENTS = 1 << 26
"""Of memory that two parameters share, up to which it is found out whether they have an element in common."""

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def check_modules(model: nn.Module) -> None:
    """Check the parameters, buffers and other tensors of a whole model.

    Args:
        model: on the meta device, or with values.

    Raises:
        UserError: a tensor is no parameter or buffer, so that no rank has it; two parameters share memory, one has
            gradient hooks, or there is another thing that the layout would change.
    """
    modules = dict(model.named_modules())
    for name, module in modules.items():
        _check_lazy(name, module)
        _check_embedding(name, module)
    known = set(modules.values())
    for name, module in modules.items():
        for attribute, value in vars(module).items():
            if attribute not in _OF_MODULES and not _follows_parameters(module, attribute):
                _check_attribute(name, module, attribute, value, known)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        _check_parameter(name, parameter)
    _check_memory(parameters, dict(model.named_buffers()))


def check_hooks(modules: Mapping[str, nn.Module], layers: tuple[str, ...]) -> None:
    """Check that no hook is on a module around layers: they are called one by one, and it never is.

    Raises:
        UserError: there is one.
    """
    for name, module in modules.items():
        if has_module_hooks(module) and any(not name or layer.startswith(name + ".") for layer in layers):
            raise UserError(
                f"{_shown(name)} has a hook, which would not be called: its layers are called one by one, whatever is "
                "around them; register the hook on a layer."
            )


def _check_lazy(name: str, module: nn.Module) -> None:
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    if any(isinstance(each, UninitializedParameter | UninitializedBuffer) for _, each in own):
        kind = type(module).__name__
        raise UserError(
            f"{name!r} is a {kind}, whose sizes are not known before a first batch; give them: use "
            f"nn.{kind.removeprefix('Lazy')}."
        )


def _check_embedding(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        raise UserError(
            f"{name!r} is an {type(module).__name__} with sparse=True, whose gradients cannot be sharded; use "
            "sparse=False, which computes the same."
        )


def _check_attribute(name: str, module: nn.Module, attribute: str, value: Any, known: set[nn.Module]) -> None:
    """Tensors that are neither parameters nor buffers, and modules that the model does not know."""
    for found in _inside(value):
        where = f"{attribute!r}" if found is value else f"in {attribute!r}"
        if isinstance(found, nn.Module):
            if found not in known and any(True for _ in (*found.parameters(), *found.buffers())):
                raise UserError(
                    f"{_shown(name)} keeps a {type(found).__name__} {where}, no list of modules, so that it would not "
                    "be trained; use nn.ModuleList or nn.ModuleDict."
                )
        elif isinstance(found, nn.Parameter):
            raise UserError(
                f"{_shown(name)} keeps the parameter {where} as a plain attribute, so that it would not be trained; "
                "use nn.ParameterList or nn.ParameterDict, or read it from the module that has it."
            )
        elif found.is_meta and not _is_recomputed(module, attribute):
            raise UserError(
                f"{_shown(name)} keeps the tensor {where} as a plain attribute, which has no values where ranks make "
                f"their parts of the model; use self.register_buffer({attribute!r}, …)."
            )


def _inside(value: Any, depth: int = 3) -> Iterator[Tensor | nn.Module]:
    """Tensors, and modules in lists, of an attribute."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict | set) and depth:
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, nn.Module):
                yield each
            else:
                yield from _inside(each, depth - 1)


def _follows_parameters(module: nn.Module, attribute: str) -> bool:
    """Whether torch sets the attribute anew where a parameter of the module is set."""
    return isinstance(module, nn.RNNBase) and attribute == "_flat_weights"


def _is_recomputed(module: nn.Module, attribute: str) -> bool:
    """Whether `torch.nn.utils.weight_norm` or one like it sets the attribute before each forward pass."""
    return any(f"{attribute}_{ending}" in dict(module.named_parameters(recurse=False)) for ending in ("g", "orig"))


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if not parameter.numel():
        raise UserError(f"{name!r} is a parameter without elements; leave it out.")
    if not (parameter.is_floating_point() or parameter.is_complex()):
        raise UserError(
            f"{name!r} is a parameter of {str(parameter.dtype).removeprefix('torch.')}, and weights are floats; use "
            f"self.register_buffer({name.rpartition('.')[2]!r}, …)."
        )
    if parameter.is_complex():
        raise UserError(
            f"{name!r} is a parameter of {str(parameter.dtype).removeprefix('torch.')}, whose imaginary part would be "
            "lost; keep torch.view_as_real of it, and use torch.view_as_complex in forward."
        )
    if has_gradient_hooks(parameter):
        raise UserError(
            f"{name!r} has a gradient hook, which would see the gradient of some samples, or of a shard alone, so that "
            "the layout would change the result; change gradients in the optimizer, or what is computed in forward."
        )
    if _overlaps_itself(parameter):
        raise UserError(
            f"{name!r} is an expanded parameter, whose elements share memory, so that no optimizer can update it; keep "
            "the parameter as it is, and expand it in forward."
        )


def _overlaps_itself(tensor: Tensor) -> bool:
    reached = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reached:
                return True
            reached += stride * (size - 1)
    return False


def _check_memory(parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
    """No parameter has memory of another, or of a buffer: an update of one would have to change the other."""
    held: dict[int, list[tuple[str, Tensor]]] = {}
    for name, parameter in parameters.items():
        others = held.setdefault(storage_key(parameter), [])
        for other, tensor in others:
            if _share_elements(tensor, parameter):
                raise UserError(
                    f"{name!r} is a parameter in the memory of {other!r}, so that an update of one would change the "
                    "other; make them one parameter by assigning the parameter itself, or copy it with clone()."
                )
        others.append((name, parameter))
    for name, buffer in buffers.items():
        for other, tensor in held.get(storage_key(buffer), []):
            if _share_elements(tensor, buffer):
                raise UserError(
                    f"the buffer {name!r} is in the memory of the parameter {other!r}, whose updates it would have to "
                    "follow; read the parameter in forward, or copy it with clone()."
                )


def _share_elements(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    ends = []
    for tensor in (one, other):
        if not tensor.numel():
            return False
        start = tensor.storage_offset()
        last = start + sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
        ends.append((start, last))
    (first, until), (begin, end) = ends
    if max(first, begin) > min(until, end):
        return False
    if max(until, end) >= _MOST_ELEMENTS or one.dtype != other.dtype:
        return True
    used = torch.zeros(max(until, end) + 1, dtype=torch.bool, device="cpu")
    used.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(used.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _shown(name: str) -> str:
    return repr(name) if name else "the model"

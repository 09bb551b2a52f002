"""Batches of a custom model: any nesting of tensors whose dim 0 counts the samples, and the inputs of its layers.

A batch is a tensor, or a tuple, list, mapping or `NamedTuple` of batches. The model's first layer receives

* the batch, if it is one tensor,
* all elements of a tuple or list but the last, in order; the last is the target, which only the loss needs,
* the entries of a mapping or `NamedTuple` that the parameters of its `forward` name,

with floats cast to the dtype that the model computes in. The loss receives the batch unchanged.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from threefold.errors import UserError

_SAMPLES = "samples"


class LayerInputs(NamedTuple):
    """Positional and keyword arguments of a call of a layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class LayerSignature:
    """Parameters of a layer's `forward` by name, those without a default, and whether there is one named `samples`."""

    layer: str
    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_samples: bool

    @classmethod
    def of(cls, layer: str, module: nn.Module) -> "LayerSignature":
        found = [
            parameter
            for parameter in list(inspect.signature(type(module).forward).parameters.values())[1:]
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        others = [parameter for parameter in found if parameter.name != _SAMPLES]
        required = tuple(parameter.name for parameter in others if parameter.default is parameter.empty)
        return cls(layer, tuple(each.name for each in others), required, len(others) < len(found))

    @property
    def takes_one_tensor(self) -> bool:
        """Whether there is only one parameter, so that nothing else can be passed."""
        return len(self.names) == 1 and not self.takes_samples

    def inputs_of(self, batch: Any, dtype: torch.dtype) -> LayerInputs:
        """Return the inputs of the model's first layer, with the floats of the batch in `dtype`."""

        def convert(path: str, tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        args, kwargs = self._chosen(batch)
        return LayerInputs(tuple(_map(each, convert) for each in args), _map(kwargs, convert))

    def _chosen(self, batch: Any) -> LayerInputs:
        if isinstance(batch, Tensor):
            return LayerInputs((batch,), {})
        fields = _fields(batch)
        if fields is not None:
            missing = [name for name in self.required if name not in fields]
            if missing:
                entries = ", ".join(map(repr, fields)) or "no entries"
                raise UserError(
                    f"The layer {self.layer!r} takes {missing[0]!r} but the batch has {entries}; call the entry "
                    "as the parameter of its forward is called."
                )
            return LayerInputs((), {name: fields[name] for name in self.names if name in fields})
        inputs = tuple(batch[:-1]) or tuple(batch)
        if len(inputs) == 1 and not isinstance(inputs[0], Tensor):
            nested = inputs[0]
            return self._chosen(nested) if _fields(nested) is not None else LayerInputs(tuple(nested), {})
        return LayerInputs(inputs, {})


def forward_layer(layer: nn.Module, signature: LayerSignature, inputs: LayerInputs, samples: Any) -> Any:
    """Call a layer with its inputs, and with `samples` if it takes them."""
    more = {_SAMPLES: samples} if signature.takes_samples else {}
    return layer(*inputs.args, **inputs.kwargs, **more)


def inputs_from(output: Any, layer: str) -> LayerInputs:
    """Return the inputs of the layer after `layer`, whose output is a tensor or a tuple of positional arguments."""
    tensors = (output,) if isinstance(output, Tensor) else output
    if not isinstance(tensors, tuple | list) or not all(isinstance(each, Tensor) for each in tensors):
        held = ""
        if isinstance(tensors, tuple | list):
            other = next(each for each in tensors if not isinstance(each, Tensor))
            held = f" with a {type(other).__name__} in it"
        raise UserError(
            f"The layer {layer!r} returns a {type(output).__name__}{held} but must return a tensor or a tuple of "
            "tensors, which the next layer takes as its positional arguments."
        )
    return LayerInputs(tuple(tensors), {})


def map_tensors(batch: Any, compute: Callable[[Tensor], Any], said: str = "batch") -> Any:
    """Return the same nesting with `compute(tensor)` for each tensor; raise UserError for anything but tensors."""
    return _map(batch, lambda path, tensor: compute(tensor), said)


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, in order; raise UserError for anything but tensors."""
    return [tensor for _, tensor in _tensors_by_path(batch)]


def joined(parts: Sequence[Any]) -> Any:
    """Return the nesting of the parts with each tensor concatenated along dim 0, or stacked if it has no dims."""
    rest = [iter(tensors_of(part)) for part in parts]

    def join(tensor: Tensor) -> Tensor:
        found = [next(each) for each in rest]
        return torch.cat(found) if tensor.dim() else torch.stack(found)

    return map_tensors(parts[0], join)


def batch_size(batch: Any) -> int:
    """Return the number of samples in a batch; raise UserError if its tensors differ in it, or if it has none."""
    sizes: dict[str, int] = {}
    for path, tensor in _tensors_by_path(batch):
        if tensor.dim() == 0:
            raise UserError(f"{path} has no dims but dim 0 of each tensor of a batch must count its samples.")
        sizes[path] = len(tensor)
    if not sizes:
        raise UserError("The batch has no tensors; give it one at least, with the samples along dim 0.")
    (first, size), *others = sizes.items()
    for path, other in others:
        if other != size:
            raise UserError(
                f"{path} has {other} samples but {first} has {size}; dim 0 of each tensor of a batch must count its "
                "samples."
            )
    return size


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Split a batch into equally large micro-batches, in order; raise UserError if `parts` does not divide its size."""
    size = batch_size(batch)
    if size % parts:
        below = size // parts * parts
        raise UserError(
            f"A replica's batch has {size} samples but micro_batches is {parts}, which must divide them; use "
            f"{below or parts} samples."
        )
    each = size // parts
    cuts = (slice(start, start + each) for start in range(0, size, each))
    return [map_tensors(batch, itemgetter(cut)) for cut in cuts]


def batch_shapes(batch: Any) -> tuple[Any, ...]:
    """Return the path, shape and dtype of each tensor, which determine the shapes that the model computes."""
    return tuple((path, tuple(tensor.shape), tensor.dtype) for path, tensor in _tensors_by_path(batch))


def _fields(batch: Any) -> dict[str, Any] | None:
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return dict(zip(batch._fields, batch, strict=True))
    return None


def _map(batch: Any, compute: Callable[[str, Tensor], Any], path: str = "batch") -> Any:
    """Return the same nesting with `compute(path, tensor)` for each tensor."""
    if isinstance(batch, Tensor):
        return compute(path, batch)
    if isinstance(batch, Mapping):
        return {name: _map(each, compute, f"{path}[{name!r}]") for name, each in batch.items()}
    if isinstance(batch, tuple | list):
        named = getattr(batch, "_fields", None)
        paths = [f"{path}.{name}" for name in named] if named else [f"{path}[{n}]" for n in range(len(batch))]
        made = [_map(each, compute, place) for each, place in zip(batch, paths, strict=True)]
        return type(batch)(*made) if named else type(batch)(made)
    raise UserError(
        f"{path} is a {type(batch).__name__} but must be a tensor, or a tuple, list, dict or NamedTuple of tensors."
    )


def _tensors_by_path(batch: Any) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    _map(batch, lambda path, tensor: found.append((path, tensor)))
    return found

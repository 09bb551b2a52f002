"""Checks of a custom model, on the meta device, for anything that would train differently from one process."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from threefold.errors import UserError
from threefold.torch_private.tensors import has_gradient_hooks, has_module_hooks, storage_key

OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module, including its parameters, buffers, submodules and hooks."""


def check_modules(model: nn.Module) -> None:
    """Check an unsharded model, on the meta device or not, for tensors that ranks would lack or train otherwise."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        kind = type(module).__name__
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(isinstance(each, UninitializedParameter | UninitializedBuffer) for each in tensors):
            raise UserError(
                f"{name!r} is a {kind}, whose sizes are not known before a first batch; give them: use "
                f"nn.{kind.removeprefix('Lazy')}."
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UserError(
                f"{name!r} is an {kind} with sparse=True, whose gradients cannot be sharded; use sparse=False, which "
                "computes the same."
            )
    known = set(modules.values())
    for name, module in modules.items():
        for attribute, value in vars(module).items():
            # Torch sets `_flat_weights` again whenever a parameter of the module is set.
            if attribute not in OF_MODULES and not (isinstance(module, nn.RNNBase) and attribute == "_flat_weights"):
                _check_attribute(name, module, attribute, value, known)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        _check_parameter(name, parameter)
    _check_memory(parameters, dict(model.named_buffers()))


def check_model(model: nn.Module) -> None:
    """Check an unsharded model by itself, before its `Plan` is completed."""
    check_modules(model)
    for name, module in model.named_modules(remove_duplicate=False):
        if getattr(module, "track_running_stats", False):  # BatchNorm, InstanceNorm
            raise UserError(
                f"{name!r} is a {type(module).__name__}, which keeps statistics of the samples of its own rank, so "
                "that the layout would change the result; use a LayerNorm or GroupNorm."
            )


def check_hooks(modules: Mapping[str, nn.Module], layers: tuple[str, ...]) -> None:
    """Raise UserError if a module around layers has a hook, which would never run: layers are called one by one."""
    for name, module in modules.items():
        if has_module_hooks(module) and any(not name or layer.startswith(name + ".") for layer in layers):
            raise UserError(
                f"{_shown(name)} has a hook, which would not be called: its layers are called one by one, whatever is "
                "around them; register the hook on a layer."
            )


def _check_attribute(name: str, module: nn.Module, attribute: str, value: Any, known: set[nn.Module]) -> None:
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
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict | set) and depth:
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, nn.Module):
                yield each
            else:
                yield from _inside(each, depth - 1)


def _is_recomputed(module: nn.Module, attribute: str) -> bool:
    """Return whether `torch.nn.utils.weight_norm` or the like sets the attribute before each forward pass."""
    return any(f"{attribute}_{ending}" in dict(module.named_parameters(recurse=False)) for ending in ("g", "orig"))


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if not parameter.numel():
        raise UserError(f"{name!r} is a parameter without elements; leave it out.")
    dtype = str(parameter.dtype).removeprefix("torch.")
    if parameter.is_complex():
        raise UserError(
            f"{name!r} is a parameter of {dtype}, whose imaginary part would be lost; keep torch.view_as_real of it, "
            "and use torch.view_as_complex in forward."
        )
    if not parameter.is_floating_point():
        raise UserError(
            f"{name!r} is a parameter of {dtype}, and weights are floats; use "
            f"self.register_buffer({name.rpartition('.')[2]!r}, …)."
        )
    if has_gradient_hooks(parameter):
        raise UserError(
            f"{name!r} has a gradient hook, which would see the gradient of some samples, or of a shard alone, so that "
            "the layout would change the result; change gradients in the optimizer, or the computation in forward."
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
    if max(until, end) >= 1 << 26 or one.dtype != other.dtype:  # not compared, as it takes memory
        return True
    used = torch.zeros(max(until, end) + 1, dtype=torch.bool, device="cpu")
    used.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(used.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _shown(name: str) -> str:
    return repr(name) if name else "the model"


_BATCH_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_LOOK_UPS = (nn.Embedding, nn.EmbeddingBag)
_SPECTRAL_NORM = "_SpectralNorm"


def refuse_layout_dependent(modules: Mapping[str, nn.Module]) -> None:
    """Raise UserError if the result of a torch module depends on the layout, and name a replacement."""
    for name, module in modules.items():
        kind = type(module).__name__
        if isinstance(module, _BATCH_STATISTICS):
            raise UserError(
                f"{name!r} is a {kind}, whose statistics are those of the samples of its own rank and micro-batch, so "
                "that the layout would change the result; use a LayerNorm or GroupNorm."
            )
        if isinstance(module, _DROPOUTS) and module.p > 0:
            raise UserError(
                f"{name!r} is {kind}(p={module.p:g}), which draws from torch's generator, so that the layout "
                f"would change the dropped elements; use threefold.Dropout({module.p:g}, {name!r}), called with the "
                "activation and samples.keys, samples being a parameter of the layer's forward."
            )
        if isinstance(module, nn.MultiheadAttention | nn.RNN | nn.LSTM | nn.GRU) and module.dropout > 0:
            raise UserError(
                f"{name!r} is {kind}(dropout={module.dropout:g}), which draws from torch's generator, so that "
                "the layout would change the dropped elements; use dropout=0, with a threefold.Dropout after it."
            )
        if isinstance(module, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
            raise UserError(
                f"{name!r} is {kind}(), which draws from torch's generator, so that the layout would change the "
                "result; use a layer that draws nothing."
            )
        if isinstance(module, _LOOK_UPS) and module.max_norm is not None:
            raise UserError(
                f"{name!r} is {kind}(max_norm={module.max_norm:g}), which changes the rows that a rank looks up in "
                "its forward pass, so that the replicas' weights would part; use max_norm=None and normalize what it "
                "returns."
            )
        if isinstance(module, _LOOK_UPS) and module.scale_grad_by_freq:
            raise UserError(
                f"{name!r} is {kind}(scale_grad_by_freq=True), which counts the samples of its own rank and "
                "micro-batch, so that the layout would change the gradient; use scale_grad_by_freq=False."
            )
        if kind == _SPECTRAL_NORM or _has_spectral_norm_hook(module):
            owner = name.partition(".parametrizations.")[0]
            raise UserError(
                f"{owner!r} has spectral_norm, which estimates the norm anew in each forward pass, so that the number "
                "of micro-batches and the layout would change the result; use weight_norm, or none."
            )


def _has_spectral_norm_hook(module: nn.Module) -> bool:
    """Return whether `torch.nn.utils.spectral_norm` was applied: it leaves `weight_orig`, `weight_u` and `weight_v`."""
    buffers = {name for name, _ in module.named_buffers(recurse=False)}
    stems = [name.removesuffix("_orig") for name, _ in module.named_parameters(recurse=False) if name.endswith("_orig")]
    return any({f"{stem}_u", f"{stem}_v"} <= buffers for stem in stems)


_OF_SIZES = re.compile(r"size|shape|dimension|number of elements|channels|normalized_shape", re.IGNORECASE)
_IN_PLACE = re.compile(r"modified by an inplace operation.*?which is output \d+ of (?:As\w+Backward\d*|(\w+))")
_ON_META = re.compile(r"\bmeta\b", re.IGNORECASE)


def is_of_sizes(error: BaseException) -> bool:
    """Return whether an error reports tensor sizes that do not match."""
    return isinstance(error, RuntimeError | ValueError) and _OF_SIZES.search(str(error)) is not None


def module_of(error: BaseException, modules: Mapping[str, nn.Module]) -> str:
    """Return the name of the innermost module whose method raised an error or its cause; empty if there is none."""
    names = {id(module): name for name, module in modules.items() if name}
    found = ""
    for each in _causes(error):
        for frame, _ in walk_tb(each.__traceback__):
            found = names.get(id(frame.f_locals.get("self")), found)
    return found


def _causes(error: BaseException) -> Iterator[BaseException]:
    if error.__cause__ is not None:
        yield from _causes(error.__cause__)
    yield error


@contextmanager
def explaining_passes(roots: Iterable[nn.Module], tp: int = 1) -> Iterator[None]:
    """Explain common errors of forward and backward passes within the block in one sentence, as a UserError.

    These are an in-place operation on a tensor that the backward pass needs, a loss without a graph, a tensor without
    values, and sizes of a rank's shards of `tp` that do not match. `roots` hold their submodules under the names of the
    whole model.
    """
    try:
        yield
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if isinstance(error, UserError):
            raise
        modules = {name: module for root in roots for name, module in root.named_modules()}
        first = next(_causes(error))
        sentence = _sentence(first, module_of(error, modules), tp)
        if sentence is None:
            raise
        raise UserError(sentence) from error


def _sentence(error: BaseException, module: str, tp: int) -> str | None:
    text = " ".join(str(error).split())
    where = f"the forward pass of {module!r}" if module else "a forward pass"
    if found := _IN_PLACE.search(text):
        operation = (found[1] or "").removesuffix("0").removesuffix("Backward")
        result = f"the result of {operation}" if operation else "a tensor"
        return (
            f"A forward pass changes {result} in place, which its backward pass needs as it was; use an operation "
            "without a trailing underscore there, such as y = y + 1 instead of y.add_(1)."
        )
    if "got mixed torch.Tensor and DTensor" in text:
        return (
            f"In {where} a weight that tensor ranks share (tp {tp}) is used by itself, as in F.linear(x, "
            "layer.weight); call the layer that has it, or use Replicated() for that layer."
        )
    if "is a view and is being modified inplace" in text:
        return (
            f"In {where} an input is changed in place, which sharded weights (parallel.zero) do not allow; use an "
            "operation without a trailing underscore there, such as y = y + 1 instead of y.add_(1) or y += 1."
        )
    if "does not require grad and does not have a grad_fn" in text:
        return (
            "The loss does not depend on any parameter, as detach(), .data or torch.no_grad() has cut it from them, so "
            "that there are no gradients; compute it from the output of the last layer."
        )
    if _ON_META.search(text) and ("device" in text or "meta tensor" in text):
        return (
            f"In {where} a tensor has no values ({told_once(text)}), as the constructor keeps it outside parameters "
            "and buffers; use register_buffer."
        )
    if tp > 1 and is_of_sizes(error):
        return f"With tp {tp}, {where} fails on the part of one rank: {told_once(text)}; {ADVICE}."
    return None


ADVICE = (
    "name in shard the standalone parameters and buffers that have a value for each head or feature of a cut layer, as "
    "Sharded(dim), and take sizes from the tensors, as with -1 in view"
)
"""Remedy for tensor sizes that do not match."""


def told_once(text: str) -> str:
    """Return the first sentence of a message."""
    return text.split(". ")[0].rstrip(".!")

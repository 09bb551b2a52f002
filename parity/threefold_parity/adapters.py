"""Adapters: how a framework's tensors on a rank map to those of the whole model.

`Adapter` handles plain PyTorch: DistributedDataParallel, FSDP2, DTensor, ZeroRedundancyOptimizer, manual pipeline
stages with global names. An adapter for another framework overrides what that framework does differently; one whose
framework clips between the backward pass and the update begins with `ClippingAdapter`. For custom parallelism, a
function `place(what, name, tensor)` is enough.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from threefold_parity.placement import Piece, Placement, fill, whole
from threefold_parity.record import OUTPUT_GRADIENT
from threefold_parity.text import UserError
from threefold_parity.torch_private import local_box, persistent_buffers

Place = Callable[[str, str, Tensor], Placement | Sequence[Placement] | None]
"""Function of (what, name, the rank's tensor); returns None to leave the tensor to PyTorch.

It is asked about a "parameter", "activation", "output gradient" or "buffer". An "activation" is a module's output, and
also its gradient, if the function returns None for "output gradient". It returns several placements for a parameter
that contains several parameters of the whole model.
"""
Placed = list[tuple[Tensor, Placement]]
"""Parts of a tensor on this rank, each with its placement."""

ACTIVATION: Final = "activation"
WHOLE: Final = "(model)"
"""Name of the module that forward passes begin with; no module inside it can have this name."""
_CLIPPING: Final = ("clip_grad_norm_", "clip_grads_with_norm_")
_WRAPPERS: Final = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def clean_name(name: str) -> str:
    """Return a name in a model without the parts that PyTorch's wrappers add."""
    return ".".join(part for part in name.split(".") if f"{part}." not in _WRAPPERS)


class Adapter:
    """Adapter for plain PyTorch, and base class of the others.

    Args:
        place: returns the placement of tensors that this rank holds in part and that are not DTensors.

    Attributes:
        name: name in the record.
        batch_dim: dim of samples in activations.
        clips_before_update: whether gradients are clipped when an update begins, rather than within it.
        converts: whether a whole model can be converted to fp64 (`widen`).
        offers_wide: whether a run computes in fp64 when the environment asks for it, without a change to its script.
        models: this rank's part of the model: modules with global names.
        optimizer: optimizer of the model, or None.
    """

    name = "torch"
    batch_dim = 0
    clips_before_update = True
    converts = True
    offers_wide = False

    def __init__(self, place: Place | None = None) -> None:
        self.place = place
        self.models: list[nn.Module] = []
        self.optimizer: Any = None
        self._copy = 0
        self._norm: float | None = None  # of the gradients of an update, as the framework reports it

    def bind(self, models: list[nn.Module], optimizer: Any) -> None:
        """Bind the adapter to the models and the optimizer of the recorder."""
        self.models, self.optimizer = models, optimizer
        if any(isinstance(module, DistributedDataParallel) for model in models for module in model.modules()):
            self._copy = dist.get_rank()

    def roots(self) -> list[nn.Module]:
        """Return the modules whose forward pass is that of a micro-batch: the models, without their wrappers."""
        return [_unwrapped(model) for model in self.models]

    def widen(self) -> None:
        """Convert the models, and the optimizer's copies of their parameters, to fp64."""
        if not self.converts:
            raise UserError(f"--wide cannot convert the weights that {self.name} keeps to fp64; leave it out.")
        for name, parameter in self.parameters():
            if isinstance(parameter, DTensor):
                raise UserError(f"--wide cannot convert {name}, a DTensor, to fp64; leave it out, or do not shard.")
        for model in self.models:
            model.double()
        for state in getattr(self.optimizer, "state", {}).values():
            state |= {key: each.double() for key, each in state.items() if is_float(each) and each.dim()}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters on this rank under their names; tied ones once."""
        seen: set[int] = set()
        for model in self.models:
            for name, parameter in model.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield clean_name(name), parameter

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules whose outputs are recorded, under their names; a root has the name `WHOLE`."""
        for model in self.models:
            for name, module in modules_of(model):
                yield name or WHOLE, module

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the floating-point buffers on this rank that are in the state dict."""
        for model in self.models:
            yield from buffers_of(model)

    def placement(self, what: str, name: str, tensor: Tensor) -> tuple[Tensor, Placement]:
        """Return this rank's own tensor and its placement; `what` is as for `Place`."""
        copy = self._copy if what == "parameter" else 0
        if (placed := self.given(what, name, tensor)) is not None:
            return local(tensor), placed
        if isinstance(tensor, DTensor):
            start, size, copies, partial = local_box(tensor)
            piece = Piece((0,) * len(size), start, size)
            pieces = (piece,) if all(size) else ()
            return tensor.to_local(), Placement(tuple(tensor.shape), pieces, copies or copy, partial)
        return tensor, whole(tensor, copy)

    def given(self, what: str, name: str, tensor: Tensor) -> Placement | None:
        """Return the placement that `place` gives; None if it leaves the tensor to PyTorch.

        The gradient of an output, `OUTPUT_GRADIENT`, is placed like the output unless `place` tells them apart.
        """
        placed = None if self.place is None else self.place(what, name, tensor)
        if placed is None and what == OUTPUT_GRADIENT:
            return self.given(ACTIVATION, name, tensor)
        if placed is None or isinstance(placed, Placement):
            return placed
        raise UserError(f"The adapter gave several placements for the {what} of {name}; give one.")

    def activation(self, kind: str, name: str, tensor: Tensor) -> tuple[Tensor, Placement]:
        """Return this rank's own part of a module's output, or of its gradient, and its placement.

        `kind` is "output" or "output gradient", and `name` that of the module.
        """
        return self.placement(kind if kind == OUTPUT_GRADIENT else ACTIVATION, name, tensor)

    def numbers(self) -> Mapping[str, float]:
        """Return numbers that the framework itself reports for an update, such as its "gradient norm"."""
        return {} if self._norm is None else {"gradient norm": self._norm}

    def weight(self, name: str, parameter: nn.Parameter) -> Placed:
        placed = None if self.place is None else self.place("parameter", name, parameter.detach())
        if placed is None or isinstance(placed, Placement):
            return [self.placement("parameter", name, parameter.detach())]
        return [(local(parameter.detach()), each) for each in placed]

    def gradient(self, name: str, parameter: nn.Parameter) -> Placed:
        """Return the gradient, complete before the update; empty if the parameter has none."""
        return [] if parameter.grad is None else self._like(name, parameter, parameter.grad)

    def states(self, name: str, parameter: nn.Parameter) -> Iterator[tuple[str, Placed]]:
        """Yield the name and the value of each tensor of the optimizer's state with the parameter's shape."""
        for key, value in self._state(parameter).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
                yield key, self._like(name, parameter, value)

    def counters(self, name: str, parameter: nn.Parameter) -> Mapping[str, float]:
        """Return the learning rate, the weight decay and the count of updates of a parameter."""
        return counters_of(self._groups_with(parameter), self._state(parameter))

    def load(self, name: str, parameter: nn.Parameter, read: Callable[[str], Tensor]) -> None:
        """Fill a parameter from the whole one, which `read` returns by its name."""
        for mine, placement in self.weight(name, parameter):
            called = placement.name or name
            fill(mine, placement, read(called), called)

    def loaded(self) -> None:
        """Update the framework's own copies of the weights, after new weights were loaded."""

    def watch(self, before: Callable[[], None], after: Callable[[], None]) -> list[Any]:
        """Call `before` and `after` around each update; return handles, or none if the framework has no hook."""
        if not isinstance(self.optimizer, Optimizer):
            return []
        return [
            self.optimizer.register_step_pre_hook(lambda *_: before()),
            self.optimizer.register_step_post_hook(lambda *_: after()),
        ]

    def leave(self) -> None:
        """End this process, after all ranks have recorded their last step."""
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        sys.exit(0)

    def _optimizers(self) -> Sequence[Any]:
        return [self.optimizer]

    def _groups_with(self, parameter: Tensor) -> list[Mapping[str, Any]]:
        groups = (group for each in self._optimizers() for group in getattr(each, "param_groups", ()))
        return [group for group in groups if any(each is parameter for each in group["params"])]

    def _state(self, parameter: Tensor) -> Mapping[str, Any]:
        for optimizer in self._optimizers():
            states = getattr(optimizer, "state", None)
            found = states.get(parameter) if isinstance(states, Mapping) else None
            if found is None:
                with suppress(AttributeError, KeyError):  # ZeroRedundancyOptimizer keeps those of its own share
                    found = optimizer.optim.state.get(parameter)
            if found and isinstance(found, Mapping):
                return found
        return {}

    def _like(self, name: str, parameter: nn.Parameter, value: Tensor) -> Placed:
        """Return the placements of a value that is sharded like its parameter."""
        if isinstance(value, DTensor):
            return [self.placement("parameter", name, value)]
        return [(value, placement) for _, placement in self.weight(name, parameter)]


class AroundCall:
    """Handle that calls functions before and after each call of an object's method, until removed.

    `after` gets what the call returned.
    """

    def __init__(self, owner: Any, method: str, before: Callable[[], None], after: Callable[[Any], None]) -> None:
        self._owner, self._method = owner, method
        call = getattr(owner, method)

        def around(*args: Any, **options: Any) -> Any:
            before()
            returned = call(*args, **options)
            after(returned)
            return returned

        setattr(owner, method, around)

    def remove(self) -> None:
        delattr(self._owner, self._method)


class ClippingAdapter(Adapter):
    """Adapter that records gradients when PyTorch's functions clip them, or else when the optimizer steps.

    Clipping of other parameters, such as those of a second model, goes unnoticed.
    """

    def __init__(self, place: Place | None = None) -> None:
        super().__init__(place)
        self._functions: dict[str, Callable[..., Any]] = {}

    def watch(self, before: Callable[[], None], after: Callable[[], None]) -> list[Any]:
        handles = super().watch(before, after)
        if not handles:
            return []
        known = {id(parameter) for _, parameter in self.parameters()}
        self._functions = {name: getattr(torch.nn.utils, name) for name in _CLIPPING}
        for name, function in self._functions.items():
            setattr(torch.nn.utils, name, self._around(function, known, before))
        return [*handles, self]

    def remove(self) -> None:
        """Restore PyTorch's functions."""
        for name, function in self._functions.items():
            setattr(torch.nn.utils, name, function)

    def _around(self, function: Callable[..., Any], known: set[int], before: Callable[[], None]) -> Callable[..., Any]:
        @functools.wraps(function)
        def clip(parameters: Tensor | Iterable[Tensor], max_norm: float, *args: Any, **options: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            ours = any(id(each) in known for each in given)
            if ours:
                before()
            returned = function(given, max_norm, *args, **options)
            norm = returned if returned is not None else (args[0] if args else options.get("total_norm"))
            if ours and isinstance(norm, Tensor):
                self._norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            return returned

        return clip


def counters_of(groups: Iterable[Mapping[str, Any]], state: Mapping[str, Any]) -> dict[str, float]:
    """Return the learning rate and the weight decay of a parameter's groups, and the count of updates in its state."""
    found = {key: float(group[key]) for group in groups for key in ("lr", "weight_decay") if key in group}
    step = state.get("step")
    return found if step is None else {**found, "updates": float(step)}


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a model's modules that have a forward pass under their names, without wrappers around the model's own."""
    for name, module in model.named_modules():
        cleaned = clean_name(name)
        is_wrapper = cleaned == clean_name(name.rpartition(".")[0]) and name != ""
        if type(module).forward is not nn.Module.forward and not is_wrapper:
            yield cleaned, module


def buffers_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's floating-point buffers that are in the state dict."""
    for prefix, module in model.named_modules():
        for name, buffer in persistent_buffers(module):
            if buffer.is_floating_point() and buffer.numel():
                yield clean_name(f"{prefix}.{name}" if prefix else name), buffer


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model in a wrapper, which a script may call instead of the wrapper, by mistake or not."""
    children = list(model.named_children())
    if len(children) == 1 and f"{children[0][0]}." in _WRAPPERS:
        return _unwrapped(children[0][1])
    return model


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

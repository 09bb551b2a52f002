"""Find where a step reads a device tensor on the host, which on a GPU waits for all pending work.

On a CPU nothing distinguishes device tensors from host tensors. Here a tensor counts as the device's if it was moved to
or made on the mesh's device, is a weight of the model, or was computed from such a tensor.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

import threefold
from threefold.torch_private.fake import OperationMode, leaves
from threefold.torch_private.tensors import number_of
from threefold.train.step import Engine

_ROOT = Path(threefold.__file__).parents[1]
_aten = torch.ops.aten

_READS = (_aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten.unique_dim, _aten._unique2)
"""Operations whose result the host waits for: a number, or a tensor whose shape depends on values."""
_METHODS = ("tolist", "numpy", "cpu", "__array__", "__reduce_ex__")
"""Tensor methods that read values without an operation."""


_DEVICE_OF = Tensor.device.__get__  # type: ignore[attr-defined]


class HostReads:
    """Record each place in the package that reads a device tensor, or copies one to the device and waits, in the block.

    Args:
        engine: engine whose weights are on the device.

    Attributes:
        places: count by `file: function` of the innermost frame in the package.
    """

    def __init__(self, engine: Engine) -> None:
        self.places: Counter[str] = Counter()
        self.device = engine.mesh.device
        self._known: dict[int, Any] = {}
        for weight in engine.model.weights:
            self.note((weight.leaf, weight.master))
        self.note(state for _, _, state in engine.optimizer.states())
        self._functions, self._operations = _Functions(self), _Operations(self)

    def __enter__(self) -> Counter[str]:
        self._functions.__enter__()
        self._operations.__enter__()
        return self.places

    def __exit__(self, *error: Any) -> None:
        self._operations.__exit__(*error)
        self._functions.__exit__(*error)

    def note(self, tensors: Iterable[Any]) -> None:
        """Mark tensors as the device's."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = _local(tensor).untyped_storage()
                number = number_of(storage)
                if number not in self._known:
                    forget = lambda _, number=number: self._known.pop(number, None)  # noqa: E731
                    self._known[number] = weakref.ref(storage, forget)

    def has(self, values: Any) -> bool:
        """Return whether any tensor among nested values is the device's."""
        tensors = [each for each in leaves(values) if isinstance(each, Tensor)]
        return any(number_of(_local(each).untyped_storage()) in self._known for each in tensors)

    def is_device(self, values: Any) -> bool:
        return any(each is self.device for each in leaves(values))

    def found(self) -> None:
        """Record a host read at the current place."""
        self.places[_place()] += 1


class _Functions(TorchFunctionMode):
    """Intercept Python calls, to see which name the device."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, reads = kwargs or {}, self.reads
        name = getattr(func, "__name__", "")
        if name in _METHODS and reads.has(args[:1]):
            reads.found()
        if func == _DEVICE_OF and reads.has(args[:1]):
            return reads.device
        out = func(*args, **kwargs)
        if not reads.is_device((args[1:], kwargs)):
            return out
        if name == "to":
            if not reads.has(args[:1]):
                if not kwargs.get("non_blocking"):
                    reads.found()
                out = out.clone()
        elif name in ("tensor", "as_tensor"):
            reads.found()
        reads.note(leaves(out))
        return out


class _Operations(OperationMode):
    """Intercept operations, including those of the backward pass."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, reads = kwargs or {}, self.reads
        if reads.has((args, kwargs)):
            if func.overloadpacket in _READS or _is_masked(func, args):
                reads.found()
            out = func(*args, **kwargs)
            reads.note(leaves(out))
            return out
        return func(*args, **kwargs)


def _is_masked(func: Any, args: Any) -> bool:
    """Return whether a mask selects elements, so that the host must know their number; False where they are filled."""
    if func.overloadpacket is not _aten.index:
        return False
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _place() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT / "threefold"):
            return f"{path.relative_to(_ROOT / 'threefold')}: {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside the package"

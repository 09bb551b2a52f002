"""Private parts of torch that concern operators: functions that compiled code calls as they are."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

_F = TypeVar("_F", bound=Callable[..., Any])
_LIBRARY: Final = torch.library.Library("threefold", "FRAGMENT")


class Handle(OpaqueBase):
    """An object that compiled code passes to operators without looking into it.

    Args:
        value: the object.

    Why: code that is compiled once and called with the objects of each layer has to take them as inputs, and operators
    take no other objects of Python. A public name would replace it.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


register_opaque_type(Handle, typ="reference")


def operator(name: str, result: Callable[..., Any]) -> Callable[[_F], _F]:
    """Make a function the operator `torch.ops.threefold.<name>`, which compiled code and dry runs call as a whole.

    Args:
        name: of the operator.
        result: called with the same arguments, gives tensors like the function's results, not computed.

    The function changes no argument, and its results share no memory with them. It is not differentiable: an
    `autograd.Function` calls it in both passes.

    Not `torch.library.custom_op`, whose operators take three times as long to call. All of this is public but
    `Handle` as the type of an argument.
    """

    def make(function: _F) -> _F:
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"threefold::{name}", result, lib=_LIBRARY)
        made: _F = getattr(torch.ops.threefold, name).default
        return made

    return make

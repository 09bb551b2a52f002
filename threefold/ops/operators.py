"""Operators of this package, which compiled code and dry runs call as a whole.

Not by `torch.library.custom_op`, whose operators with a gradient take twice as long to call; the gradient of these is
that of an `autograd.Function` around them.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

_LIBRARY: Final = torch.library.Library("threefold", "FRAGMENT")


def define(name: str, compute: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """Make `torch.ops.threefold.<name>`, and return it.

    Args:
        name: of the operator.
        compute: what it does; its signature, with types, is the operator's.
        shapes: of the same arguments, tensors like its results, not filled.
    """
    _LIBRARY.define(name + torch.library.infer_schema(compute, mutates_args=()))
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"threefold::{name}", shapes, lib=_LIBRARY)
    return getattr(torch.ops.threefold, name)

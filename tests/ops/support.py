"""What the tests of exact arithmetic share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from threefold.ops import exact

THREADS = (1, 2, 4)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 31 * sum(shape))) * 2


def equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other)


def same_in_threads(compute: Callable[[], Any]) -> Any:
    """Return the result, which must not depend on the number of threads."""
    found = []
    for count in THREADS:
        torch.set_num_threads(count)
        result = compute()
        found.append(result if isinstance(result, tuple) else (result,))
    torch.set_num_threads(1)
    for other in found[1:]:
        assert all(map(equal, found[0], other)), "depends on threads"
    return found[0] if isinstance(result, tuple) else found[0][0]


def with_gradients(compute: Callable[..., Tensor], *inputs: Tensor, upper: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the result and the gradients of all inputs, given that of the result."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = compute(*leaves)
    grad = drawn(*out.shape, seed=7) if upper is None else upper
    return (out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype)))


def tree(parts: list[Tensor]) -> Tensor:
    return exact.tree_sum(each.clone() for each in parts)

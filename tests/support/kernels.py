"""Kernels of matrix products that misbehave: an element's bits depend on what is computed beside it, and by whom."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.mistakes import Patch
from threefold.exact import products as exact_products
from threefold.exact.products import Products

Kernel = Callable[[Tensor, Tensor], Tensor]


def _summed(a: Tensor, b: Tensor, split: int) -> Tensor:
    """Compute `a @ b.T` as two sums over k, each rounded to the dtype; `split` decides the terms of the first."""
    first = split % 5 * a.shape[1] // 5
    parts = ((a[:, part].float(), b[:, part].float()) for part in (slice(0, first), slice(first, None)))
    # In fp64, so that the kernel below these has no part in it; fp32 holds no order of such sums.
    one, other = (F.linear(x.double(), y.double()).to(a.dtype) for x, y in parts)
    return one + other


def by_rows(a: Tensor, b: Tensor) -> Tensor:
    return _summed(a, b, len(a))


def by_columns(a: Tensor, b: Tensor) -> Tensor:
    return _summed(a, b, len(b))


def by_threads(a: Tensor, b: Tensor) -> Tensor:
    return _summed(a, b, torch.get_num_threads())


def by_place(a: Tensor, b: Tensor) -> Tensor:
    """As by a kernel that computes the rest of a call, which does not fill a tile, otherwise."""
    rest = len(a) % 3
    return torch.cat([_summed(a[: len(a) - rest], b, 1), _summed(a[len(a) - rest :], b, 2)])


def by_memory(a: Tensor, b: Tensor) -> Tensor:
    return _summed(a, b, a.data_ptr() % 64 // a.itemsize + 2 * b.is_contiguous())


KERNELS: Final[dict[str, Kernel]] = {
    "rows": by_rows,
    "columns": by_columns,
    "threads": by_threads,
    "place": by_place,
    "memory": by_memory,
}


def of_batch(kernel: Kernel) -> Kernel:
    """Return a kernel of batches [n, m, k] and [n, k, p] that also depends on their number."""

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        more = torch.cat([a, a[:, :1].expand(-1, len(a), -1)], 1)  # as many rows more as there are matrices
        found = [kernel(one, other) for one, other in zip(more.unbind(), b.mT.unbind(), strict=True)]
        return torch.stack(found)[:, : a.shape[1]]

    return multiply


def products_of(kernel: Kernel) -> Products:
    return Products(kernel, of_batch(kernel))


def with_kernel(name: str) -> list[Patch]:
    """Return patches (`with_mistake`): products of this process by a kernel of `KERNELS`, with no trials yet."""
    kernel, here = KERNELS[name], exact_products.PRODUCTS
    return [(here, "_multiply", kernel), (here, "_multiply_batch", of_batch(kernel)), (here, "_is_equal", {})]

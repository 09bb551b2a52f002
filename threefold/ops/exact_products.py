"""Products and sums of exact runs, whose bits depend on no shape that a layout decides (`ops.exact`)."""

from collections.abc import Iterable
from functools import cache
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from threefold.torch_private.tensors import onednn_linear

_SMALL: Final = 1 << 20
"""Maximum number of elements of the pieces of a product that are computed together. Fewer leave a piece too little work
for two threads; more do not fit the cache."""
_CHAIN: Final = 128
"""Longest sum of a batch of products in fp32: up to about this length, the kernels of MKL and oneDNN add up the terms
one by one in their order, so that their bits are the same."""
_VECTOR: Final = 16
"""Elements of a vector, or several vectors: sizes that are not multiples of it have different bits at their ends."""


def tree_sum(parts: Iterable[Tensor]) -> Tensor:
    """Sum tensors of one shape in a balanced binary tree, in place in the first of each pair: (a + b) + (c + d).

    At most ⌈log₂ n⌉ + 1 of n tensors are alive at once if `parts` makes them one by one. If n is not a power of two,
    the subtrees that are left over are added from the last to the first.
    """
    stack: list[Tensor] = []
    for number, part in enumerate(parts, 1):
        total = part
        while number % 2 == 0:
            total = stack.pop().add_(total)
            number //= 2
        stack.append(total)
    total = stack.pop()
    while stack:
        total = stack.pop().add_(total)
    return total


def sum_dim(x: Tensor, dim: int) -> Tensor:
    """Sum a dim in a balanced binary tree of neighbors; the last of an odd number is added on a later level."""
    while (size := x.shape[dim]) > 1:
        even = size // 2 * 2
        pairs = x if even == size else x.narrow(dim, 0, even)
        one, other = pairs.unflatten(dim, (-1, 2)).unbind(dim + 1)
        x = one + other if even == size else torch.cat([one + other, x.narrow(dim, even, 1)], dim)
    return x.squeeze(dim) if x.shape[dim] else x.sum(dim)


def product(a: Tensor, b: Tensor, pieces: int = 1) -> Tensor:
    """Compute `a @ b.T` of `a` [m, k] and `b` [n, k] as the tree sum of `pieces` products over equal parts of k.

    Bits of an element depend on its row of `a` and its row of `b` alone. Every sum of the tree is rounded to the dtype
    of the operands, as those over ranks are.
    """
    if pieces == 1:
        return _whole_product(a, b)
    if pieces * a.shape[0] * b.shape[0] <= _SMALL:
        together = _batch_of_products(*(each.unflatten(1, (pieces, -1)).transpose(0, 1) for each in (a, b)))
        if together is not None:
            return sum_dim(together, 0)
    size = a.shape[1] // pieces
    parts = ((a.narrow(1, first, size), b.narrow(1, first, size)) for first in range(0, a.shape[1], size))
    return tree_sum(_whole_product(*each) for each in parts)


def products(a: Tensor, b: Tensor) -> Tensor:
    """Compute `a @ b.mT` of [n, m, k] and [n, p, k]: [n, m, p], a tree sum over runs of k.

    Bits of an element depend on its row of `a` and its row of `b` alone.
    """
    if a.shape[2] <= _CHAIN or a.dtype != torch.float32:
        return _products(a, b)
    return tree_sum(_products(*each) for each in zip(a.split(_CHAIN, 2), b.split(_CHAIN, 2), strict=True))


def _products(a: Tensor, b: Tensor) -> Tensor:
    if (together := _batch_of_products(a, b)) is not None:
        return together
    found = [_whole_product(one, other) for one, other in zip(a.unbind(), b.unbind(), strict=True)]
    return torch.stack(found) if len(found) > 1 else found[0].unsqueeze(0)


def _batch_of_products(a: Tensor, b: Tensor) -> Tensor | None:
    """Compute `a @ b.mT` as a batch by torch, of whole vectors; None unless it has the bits of single products."""
    if not _onednn_computes(a, b):
        return None
    if a.untyped_storage().device.type == "meta":  # in a dry run, where there are no bits
        return torch.bmm(a, b.mT)
    batch = _batch(*_in_memory(a), *_in_memory(b), a.dtype, torch.get_num_threads())
    if batch is None:
        return None
    one, other = (_padded(x) if is_padded else x for x, is_padded in zip((a, b), batch, strict=True))
    found, rows, columns = torch.bmm(one, other.mT), a.shape[1], b.shape[1]
    return found if found.shape[1:] == (rows, columns) else found[:, :rows, :columns].contiguous()


def _in_memory(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Return shape, strides, and whether it begins with a whole vector."""
    return x.shape, x.stride(), x.data_ptr() % (_VECTOR * x.element_size()) == 0


def _padded(x: Tensor) -> Tensor:
    """Return a copy of `x` [n, m, k] with zeros behind m and k so that all rows begin and end with whole vectors."""
    count, rows, inner = x.shape
    padded = x.new_zeros(count, _whole_vectors(rows), _whole_vectors(inner))
    padded[:, :rows, :inner] = x
    return padded


def _whole_vectors(size: int) -> int:
    return -(-size // _VECTOR) * _VECTOR


@cache
def _batch(
    a_shape: tuple[int, int, int],
    a_stride: tuple[int, ...],
    a_aligned: bool,
    b_shape: tuple[int, int, int],
    b_stride: tuple[int, ...],
    b_aligned: bool,
    dtype: torch.dtype,
    threads: int,
) -> tuple[bool, bool] | None:
    """Return whether a batch needs `a` and `b` of `products` padded; None if it has other bits than single products."""
    padded, turned = [], []
    for shape, stride, aligned in ((a_shape, a_stride, a_aligned), (b_shape, b_stride, b_aligned)):
        sizes = (*shape[1:], *(step for step in stride if step != 1))
        # The trial has matrices of dense rows or columns; torch computes those that repeat memory with another kernel.
        (step, length) = (stride[1], shape[2]) if stride[2] == 1 else (stride[2], shape[1])
        as_tried = 1 in stride[1:] and step >= length and (stride[0] != 0 or shape[0] == 1)
        padded.append(not aligned or not as_tried or any(size % _VECTOR for size in sizes))
        turned.append(not padded[-1] and stride[2] != 1)
    count, rows, inner = a_shape
    whole = count, _whole_vectors(rows), _whole_vectors(inner), _whole_vectors(b_shape[1])
    has_bits = _batch_has_bits_of_products(whole, (turned[0], turned[1]), dtype, threads)
    return (padded[0], padded[1]) if has_bits else None


@cache
def _batch_has_bits_of_products(
    sizes: tuple[int, int, int, int], turned: tuple[bool, bool], dtype: torch.dtype, threads: int
) -> bool:
    """Return whether a batch of n, m, k, p has the bits of single products, tried once with drawn numbers."""
    count, rows, inner, columns = sizes
    draws = torch.Generator().manual_seed(0)

    def drawn(rows: int, is_turned: bool) -> Tensor:
        shape = (count, inner, rows) if is_turned else (count, rows, inner)
        x = torch.randn(shape, generator=draws, device="cpu").to(dtype)
        return x.mT if is_turned else x

    a, b = drawn(rows, turned[0]), drawn(columns, turned[1])
    single = [_whole_product(one, other) for one, other in zip(a.unbind(), b.unbind(), strict=True)]
    return torch.equal(torch.bmm(a, b.mT), torch.stack(single))


def _onednn_computes(a: Tensor, b: Tensor) -> bool:
    return a.device.type == "cpu" and a.dtype != torch.float64 and a.numel() > 0 < b.numel()


def _whole_product(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda:
        return tiled_product(a, b)
    if not _onednn_computes(a, b):
        return F.linear(a, b)
    # oneDNN even where MKL is faster, because MKL's bits depend on the number of rows. A product with a single row or
    # column uses another kernel, with different bits, as do strided views, for which oneDNN is a thousand times slower.
    rows, columns = a.shape[0], b.shape[0]
    if rows == 1 or columns == 1:
        a, b = (x.expand(2, -1) if len(x) == 1 else x for x in (a, b))
        return _dense_product(a, b)[:rows, :columns]
    if not a.is_contiguous() and a.t().is_contiguous() and b.numel() + rows * columns < a.numel():
        return _dense_product(b, a).t().contiguous()  # copies less
    return _dense_product(a, b)


def tiled_product(a: Tensor, b: Tensor, tile: int = 1024) -> Tensor:
    """Compute `a @ b.T` of `a` [m, k] and `b` [n, k] by products of `tile` rows of each, filled up with zeros.

    cuBLAS chooses a kernel, and with it the order of a sum, by the sizes, strides and alignment of its operands. These
    are the same in every call with the same k.
    """
    out = a.new_empty(len(a), len(b))
    rows, columns = (range(0, len(x), tile) for x in (a, b))
    others = [_filled(b[first : first + tile], tile) for first in columns]
    for row in rows:
        one = _filled(a[row : row + tile], tile)
        for column, other in zip(columns, others, strict=True):
            place = out[row : row + tile, column : column + tile]
            place.copy_(F.linear(one, other)[: place.shape[0], : place.shape[1]])
    return out


def _filled(x: Tensor, rows: int) -> Tensor:
    filled = x.new_zeros(rows, x.shape[1])
    filled[: len(x)] = x
    return filled


def _dense_product(a: Tensor, b: Tensor) -> Tensor:
    return onednn_linear(a.contiguous(), b if b.t().is_contiguous() else b.contiguous(), None)

"""Products and sums of exact runs, whose bits depend on no shape that a layout decides (`exact.layers`).

A library may compute an element of a product otherwise if it computes more rows beside it, or with more threads:
oneDNN does so in bf16 on processors with AMX. So the bits of a product are *defined* here, by calls that are the same
in every layout (`Products.by_parts`). A faster way takes their place only where it has had the same bits in a trial on
this processor, in this process, for operands of the same shape and place in memory.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from threefold.torch_private.tensors import onednn_linear

Parts: TypeAlias = tuple[tuple[int, ...], ...]
"""Parts of rows that no layout cuts: the numbers of the chunks of each, of as many equal chunks as all parts have."""

WHOLE: Final[Parts] = ((0,),)
_SMALL: Final = 1 << 20
"""Maximum number of elements of the pieces of a product that are computed together. Fewer leave a piece too little work
for two threads; more do not fit the cache."""
_CHAIN: Final = 128
"""Longest sum of a batch of products in fp32: up to about this length, the kernels of MKL and oneDNN add up the terms
one by one in their order, so that their bits are the same."""
_VECTOR: Final = 16
"""Elements of a vector, or several vectors: sizes that are not multiples of it have different bits at their ends."""
_ALIGNMENT: Final = 64  # bytes, of the memory of new tensors
_DRAWS: Final = 8  # maximum number of a trial, as two terms of a few may hide the place of a sum's cut
_TRIED: Final = 1 << 30  # multiply-adds of a trial, in as many draws as it takes
_DRAWN_ROWS: Final = 509  # of a trial's operands, then repeated: drawing a large one takes longer than its product


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


def equal_parts(count: int) -> Parts:
    """Return `count` parts of one chunk each."""
    return tuple((number,) for number in range(count))


class Products:
    """Products on a CPU whose bits do not depend on what a layout decides, whatever the kernels do.

    Args:
        multiply: kernel that computes `a @ b.T` of contiguous `a` [m, k] and contiguous or transposed `b` [n, k].
        multiply_batch: kernel that computes `a @ b` of [n, m, k] and [n, k, p].

    Attributes:
        trials: number of trials, in which a faster way was compared with the definition.
        refused: number of these in which it had other bits.
        seconds: time that the trials have taken.
    """

    def __init__(
        self, multiply: Callable[[Tensor, Tensor], Tensor], multiply_batch: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self._multiply, self._multiply_batch = multiply, multiply_batch
        self._is_equal: dict[Any, bool] = {}
        self.trials, self.refused, self.seconds = 0, 0, 0.0

    def product(self, a: Tensor, b: Tensor, pieces: int = 1, rows: Parts = WHOLE, columns: int = 1) -> Tensor:
        """Compute `a @ b.T` of `a` [m, k] and `b` [n, k] as the tree sum of `pieces` products over equal parts of k.

        Bits of an element depend on its part of `a` (`rows`) and its part of `b` (one of `columns` equal ones) alone.
        Every sum of the tree is rounded to the dtype of the operands, as those over ranks are.
        """
        rows = rows if len(a) % sum(map(len, rows)) == 0 else WHOLE
        columns = columns if len(b) % columns == 0 else 1
        if pieces == 1:
            return self._product(a, b, rows, columns)
        if pieces * a.shape[0] * b.shape[0] <= _SMALL:
            one, other = (each.unflatten(1, (pieces, -1)).transpose(0, 1) for each in (a, b))
            together = self._together(one, other, rows, columns)
            if together is not None:
                return sum_dim(together, 0)
        size = a.shape[1] // pieces
        parts = ((a.narrow(1, first, size), b.narrow(1, first, size)) for first in range(0, a.shape[1], size))
        return tree_sum(self._product(*each, rows, columns) for each in parts)

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute `a @ b.mT` of [n, m, k] and [n, p, k]: [n, m, p], a tree sum over runs of k.

        Bits of an element depend on its matrices alone.
        """
        if a.shape[2] <= _CHAIN or a.dtype != torch.float32:
            return self._products(a, b)
        return tree_sum(self._products(*each) for each in zip(a.split(_CHAIN, 2), b.split(_CHAIN, 2), strict=True))

    def by_parts(self, a: Tensor, b: Tensor, rows: Parts = WHOLE, columns: int = 1) -> Tensor:
        """Compute `a @ b.T` by definition: one call for each part of `a` and of `b`, by one thread.

        The operands of such a call have the same shapes in every layout, are contiguous and begin with whole vectors.
        """
        with _one_thread():
            if rows == WHOLE and columns == 1:
                return self._at_once(_fresh(a), _fresh(b))
            out = a.new_empty(len(a), len(b))
            for chunk, columns_of_part, found in self._calls(a, b, rows, columns):
                out[chunk, columns_of_part] = found
        return out

    def _calls(self, a: Tensor, b: Tensor, rows: Parts, columns: int) -> Iterator[tuple[slice, slice, Tensor]]:
        """Make the calls of `by_parts`; yield (rows, columns, their elements), chunk by chunk."""
        chunks, others = a.chunk(sum(map(len, rows))), [*map(_fresh, b.chunk(columns))]
        height, width = len(chunks[0]), len(others[0])
        for part in rows:
            one = _fresh(chunks[part[0]] if len(part) == 1 else torch.cat([chunks[number] for number in part]))
            for place, other in enumerate(others):
                of_chunks = self._at_once(one, other).split(height)
                for number, found in zip(part, of_chunks, strict=True):
                    yield (
                        slice(number * height, (number + 1) * height),
                        slice(place * width, (place + 1) * width),
                        found,
                    )

    def _product(self, a: Tensor, b: Tensor, rows: Parts, columns: int) -> Tensor:
        if a.is_cuda:
            return tiled_product(a, b)
        if not _is_ours(a, b):
            return F.linear(a, b)
        if _is_meta(a):
            return self._at_once(a, b)
        forms, threads = (_form(a), _form(b)), torch.get_num_threads()
        if threads == 1 and rows == WHOLE and columns == 1 and all(form[-2:] == (0, 0) for form in forms):
            return self._at_once(a, b)  # which is the definition

        def trial() -> bool:
            for drawn in _adverse(len(a), len(b), a.shape[1], a.dtype):
                one, other = map(_placed, drawn, forms)
                found = self._at_once(one, other)
                with _one_thread():
                    calls = self._calls(one, other, rows, columns)
                    if not all(torch.equal(part, found[chunk, place]) for chunk, place, part in calls):
                        return False
            return True

        is_equal = self._tried((*forms, rows, columns, a.dtype, threads), trial)
        return self._at_once(a, b) if is_equal else self.by_parts(a, b, rows, columns)

    def _tried(self, key: Any, trial: Callable[[], bool]) -> bool:
        found = self._is_equal.get(key)
        if found is None:
            started = time.perf_counter()
            with torch.no_grad():
                found = self._is_equal[key] = trial()
            self.trials, self.refused = self.trials + 1, self.refused + (not found)
            self.seconds += time.perf_counter() - started
        return found

    def _at_once(self, a: Tensor, b: Tensor) -> Tensor:
        # A product with a single row or column uses another kernel, with different bits, as do strided views, for which
        # oneDNN is a thousand times slower.
        rows, columns = a.shape[0], b.shape[0]
        if rows == 1 or columns == 1:
            a, b = (x.expand(2, -1) if len(x) == 1 else x for x in (a, b))
            return self._dense(a, b)[:rows, :columns]
        if not a.is_contiguous() and a.t().is_contiguous() and b.numel() + rows * columns < a.numel():
            return self._dense(b, a).t().contiguous()  # copies less
        return self._dense(a, b)

    def _dense(self, a: Tensor, b: Tensor) -> Tensor:
        return self._multiply(a.contiguous(), b if b.t().is_contiguous() else b.contiguous())

    def _products(self, a: Tensor, b: Tensor) -> Tensor:
        if (together := self._together(a, b)) is not None:
            return together
        found = [self._product(one, other, WHOLE, 1) for one, other in zip(a.unbind(), b.unbind(), strict=True)]
        return torch.stack(found) if len(found) > 1 else found[0].unsqueeze(0)

    def _together(self, a: Tensor, b: Tensor, rows: Parts = WHOLE, columns: int = 1) -> Tensor | None:
        """Compute `a @ b.mT` of [n, m, k] and [n, p, k] as one batch; None if single products have other bits."""
        if a.device.type != "cpu" or not _is_ours(a, b):
            return None
        if _is_meta(a):  # in a dry run, where there are no bits
            return self._multiply_batch(a, b.mT)
        forms = _batch_form(a), _batch_form(b)

        def trial() -> bool:
            (count, height, inner), width = a.shape, b.shape[1]
            for drawn in _adverse(count * height, count * width, inner, a.dtype):
                one, other = (_strided(x.view(count, -1, inner), *form) for x, form in zip(drawn, forms, strict=True))
                found = self._batch(one, other).unbind()
                single = zip(found, one.unbind(), other.unbind(), strict=True)
                if not all(torch.equal(each, self.by_parts(x, y, rows, columns)) for each, x, y in single):
                    return False
            return True

        key = *forms, rows, columns, a.dtype, torch.get_num_threads()
        return self._batch(a, b) if self._tried(key, trial) else None

    def _batch(self, a: Tensor, b: Tensor) -> Tensor:
        one, other = (_padded(x) if _batch_form(x)[1] is None else x for x in (a, b))
        found, height, width = self._multiply_batch(one, other.mT), a.shape[1], b.shape[1]
        return found if found.shape[1:] == (height, width) else found[:, :height, :width].contiguous()


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    if before > 1:
        torch.set_num_threads(1)  # takes 0.1 µs
    try:
        yield
    finally:
        if before > 1:
            torch.set_num_threads(before)


def _is_ours(a: Tensor, b: Tensor) -> bool:
    return a.dtype != torch.float64 and a.numel() > 0 < b.numel()


def _is_meta(x: Tensor) -> bool:
    return x.untyped_storage().device.type == "meta"


def _form(x: Tensor) -> tuple[int, int, int, int]:
    """Return the sizes of a matrix, whether it is transposed, and the bytes between its start and a whole vector."""
    is_turned = not x.is_contiguous()
    if is_turned and not x.t().is_contiguous():  # a product copies it
        return (*x.shape, 0, 0)
    return (*x.shape, int(is_turned), x.data_ptr() % _ALIGNMENT)


def _placed(x: Tensor, form: tuple[int, int, int, int]) -> Tensor:
    """Return a copy of a matrix in memory of this form."""
    *shape, is_turned, offset = form
    memory = x.new_empty(x.numel() + _ALIGNMENT // x.itemsize)[offset // x.itemsize :][: x.numel()]
    return (memory.view(shape[::-1]).t() if is_turned else memory.view(shape)).copy_(x)


def _fresh(x: Tensor) -> Tensor:
    """Return `x`, or a copy, contiguous and at the start of a vector."""
    if x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _batch_form(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return the shape of a batch, and its strides; None in place of them for a batch that must be padded.

    A batch may be computed where it is if all rows, or all columns, begin with whole vectors and none repeats memory,
    for which torch uses another kernel.
    """
    shape, stride = tuple(x.shape), x.stride()
    (step, length) = (stride[1], shape[2]) if stride[2] == 1 else (stride[2], shape[1])
    has_own_memory = 1 in stride[1:] and step >= length and (stride[0] != 0 or shape[0] == 1)
    sizes = (*shape[1:], *(each for each in stride if each != 1))
    is_aligned = x.data_ptr() % (_VECTOR * x.element_size()) == 0
    return shape, stride if has_own_memory and is_aligned and not any(size % _VECTOR for size in sizes) else None


def _strided(x: Tensor, shape: Sequence[int], stride: Sequence[int] | None) -> Tensor:
    return x if stride is None else torch.empty_strided(shape, stride, dtype=x.dtype).copy_(x)


def _padded(x: Tensor) -> Tensor:
    """Return a copy of `x` [n, m, k] with zeros behind m and k so that all rows begin and end with whole vectors."""
    count, rows, inner = x.shape
    padded = x.new_zeros(count, _whole_vectors(rows), _whole_vectors(inner))
    padded[:, :rows, :inner] = x
    return padded


def _whole_vectors(size: int) -> int:
    return -(-size // _VECTOR) * _VECTOR


def _adverse(rows: int, columns: int, inner: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw operands [rows, inner] and [columns, inner] whose products show the order of their sums, several times.

    Of plain drawn numbers, a sum in another order may differ in seven of 262,144 elements, once it is rounded to bf16.
    So a quarter of the terms cancels another quarter, and in three of four rows both are larger than the rest, by up to
    2^6, 2^12 or 2^20. An eighth of the elements is among the smallest numbers.
    """
    draws = torch.Generator().manual_seed(0)
    spans = torch.tensor([0.0, 6.0, 12.0, 20.0], device="cpu")
    few = inner // 4
    for _ in range(max(1, min(_DRAWS, _TRIED // (rows * columns * max(1, inner))))):
        a, b = (torch.randn(min(size, _DRAWN_ROWS), inner, generator=draws, device="cpu") for size in (rows, columns))
        places = torch.randperm(inner, generator=draws, device="cpu")
        large, cancelling = places[:few], places[few : 2 * few]
        sizes = torch.rand(few, generator=draws, device="cpu") * spans[torch.arange(len(a), device="cpu") % 4, None]
        a[:, large] *= 2.0 ** sizes.round()
        a[:, cancelling], b[:, cancelling] = -a[:, large], b[:, large]
        a[4::8] *= 2.0**-66
        b[1::2] *= 2.0**-66
        one, other = (torch.arange(size, device="cpu") % len(x) for x, size in ((a, rows), (b, columns)))
        yield a.to(dtype)[one], b.to(dtype)[other]


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


@cache
def _has_products(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies matrices of a dtype on this processor: with AVX2 alone, none of bf16."""
    x = torch.zeros(16, 16, dtype=dtype, device="cpu")
    try:
        onednn_linear(x, x, None)
    except RuntimeError:
        return False
    return True


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    # oneDNN even where MKL is faster, as fewer of MKL's products have the same bits in one call as in several.
    if _is_meta(a) or _has_products(a.dtype):
        return onednn_linear(a, b, None)
    return onednn_linear(a.float(), b.float(), None).to(a.dtype)


def _multiply_batch(a: Tensor, b: Tensor) -> Tensor:
    if _is_meta(a) or _has_products(a.dtype):
        return torch.bmm(a, b)
    return torch.bmm(a.float(), b.float()).to(a.dtype)


PRODUCTS: Final = Products(_multiply, _multiply_batch)
"""Products of this process."""
product, products = PRODUCTS.product, PRODUCTS.products

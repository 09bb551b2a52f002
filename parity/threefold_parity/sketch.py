"""Parts of a tensor that a record keeps: its norm, a grid of its elements, and a projection along each dim.

A projection along a dim contracts all others with vectors of random signs, so that each of its elements depends on
every element of a slice: a shard that is missing, scaled or misplaced shows in the slices that it lies in, at the size
that it has in the tensor. All parts are sums or subsets over elements, so those of a whole tensor are assembled from
those of its pieces. Signs and grids depend on sizes alone: any two records have the same.
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Final

import torch
from torch import Tensor

from threefold_parity.placement import Piece


@dataclass(frozen=True)
class Detail:
    """Amount that is kept of a tensor.

    Attributes:
        elements: largest number of elements in the grid. A tensor with no more is kept whole, without projections.
        slices: largest number of elements of a projection; 0 for no limit.
    """

    elements: int
    slices: int


PARAMETER, SAMPLE, COPY, WHOLE = Detail(4096, 0), Detail(256, 64), Detail(64, 16), Detail(1 << 62, 0)
"""Details of parameters (gradients, updates, states), of a sample's activation, of further copies, and of all there is.
"""


def grid(shape: tuple[int, ...], detail: Detail) -> list[Tensor]:
    """Return the indices along each dim whose combinations are the grid of a tensor."""
    return [_chosen(size, count) for size, count in zip(shape, _counts(shape, detail.elements), strict=True)]


def has_projections(shape: tuple[int, ...], detail: Detail) -> bool:
    return prod(shape) > detail.elements


def kept_size(shape: tuple[int, ...], detail: Detail) -> int:
    """Return the number of values that are kept of a whole tensor at most, without making its grid."""
    projections = sum(buckets(size, detail) for size in shape) if has_projections(shape, detail) else 0
    return min(prod(shape), detail.elements) + projections


def buckets(size: int, detail: Detail) -> int:
    """Return the number of elements of the projection along a dim of `size`."""
    return min(size, detail.slices) if detail.slices else size


def bucket_of(size: int, detail: Detail) -> Tensor:
    """Return the element of the projection that each index of a dim adds to."""
    count = buckets(size, detail)
    return torch.arange(size) * count // max(size, 1)


@cache
def _counts(shape: tuple[int, ...], limit: int) -> tuple[int, ...]:
    counts = [min(size, 1) for size in shape]
    while prod(counts) < prod(shape):
        # The dim with the fewest elements of the grid doubles, where it has more and the limit allows.
        order = sorted(range(len(shape)), key=lambda dim: counts[dim])
        for dim in order:
            more = min(2 * counts[dim], shape[dim])
            if more > counts[dim] and prod(counts) // counts[dim] * more <= limit:
                counts[dim] = more
                break
        else:
            break
    return tuple(counts)


_GOLDEN: Final = 0.6180339887498949


@cache
def _chosen(size: int, count: int) -> Tensor:
    """Return `count` indices, spread evenly; a smaller count has some of those of a larger one."""
    if count == size:
        return torch.arange(size)
    found: dict[int, None] = {}
    step = 0
    while len(found) < count:  # multiples of the golden ratio are spread evenly at every length
        step += 1
        found[int(step * _GOLDEN % 1.0 * size)] = None
        if step > 8 * size:
            found.update(dict.fromkeys(range(size)))
    return torch.tensor(sorted(list(found)[:count]))


@cache
def signs(size: int) -> Tensor:
    """Return random signs for a dim, as a float64 vector of ones and minus ones."""
    generator = torch.Generator().manual_seed(0x5EED + size)
    return torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1


@cache
def length(shape: tuple[int, ...], piece: Piece, detail: Detail) -> int:
    """Return the number of values that are kept of a piece."""
    count = 1 + prod(len(index) for index in inside(shape, piece, detail))
    if has_projections(shape, detail):
        count += sum(len(_own_buckets(size, start, extent, detail)) for size, start, extent in _spans(shape, piece))
    return count


def keep(box: Tensor, shape: tuple[int, ...], piece: Piece, detail: Detail) -> Tensor:
    """Return the values that are kept of a piece of a tensor, for `samples` tensors of one shape at once.

    The box is (samples, *piece.size), floating; the result (samples, length): the sum of squares, the projection's
    elements along each dim, the elements of the grid; in the box's precision, in fp32 if that is lower.
    """
    wide = box.detach().to(torch.promote_types(box.dtype, torch.float32))
    samples = wide.shape[0]
    flat = wide.reshape(samples, -1)
    parts = [torch.linalg.vector_norm(flat, dim=1, keepdim=True).square()]
    if has_projections(shape, detail):
        weights = [signs(size)[start : start + extent].to(wide) for size, start, extent in _spans(shape, piece)]
        for dim, (size, start, extent) in enumerate(_spans(shape, piece)):
            along = wide
            for other in reversed(range(len(shape))):
                if other != dim:
                    along = _summed(along, 1 + other, weights[other])
            if buckets(size, detail) != size:
                own = _own_buckets(size, start, extent, detail)
                at = bucket_of(size, detail)[start : start + extent] - own.start
                pooled = along.new_zeros(samples, len(own))
                along = pooled.index_add_(1, at.to(along.device), along * weights[dim])
            parts.append(along)
    chosen = wide
    for dim, index in enumerate(inside(shape, piece, detail)):
        if len(index) != chosen.shape[1 + dim]:
            chosen = chosen.index_select(1 + dim, index.to(wide.device))
    parts.append(chosen.reshape(samples, -1))
    return torch.cat(parts, dim=1).cpu()


def _summed(tensor: Tensor, dim: int, weights: Tensor) -> Tensor:
    """Return the weighted sum over a dim; `torch.tensordot` would copy the tensor for a dim that is not the last."""
    shape = tensor.shape
    outer, inner = prod(shape[:dim]), prod(shape[dim + 1 :])
    if inner == 1:
        summed = tensor.reshape(outer, shape[dim]) @ weights
    else:
        summed = torch.matmul(weights, tensor.reshape(outer, shape[dim], inner))
    return summed.reshape(*shape[:dim], *shape[dim + 1 :])


def _spans(shape: tuple[int, ...], piece: Piece) -> list[tuple[int, int, int]]:
    return list(zip(shape, piece.start, piece.size, strict=True))


@cache
def _own_buckets(size: int, start: int, extent: int, detail: Detail) -> range:
    own = bucket_of(size, detail)[start : start + extent]
    return range(int(own[0]), int(own[-1]) + 1) if extent else range(0)


@cache
def inside(shape: tuple[int, ...], piece: Piece, detail: Detail) -> tuple[Tensor, ...]:
    """Return the grid's indices within a piece, along each dim, counted from its start."""
    return tuple(
        index[(index >= start) & (index < start + extent)] - start
        for index, (_, start, extent) in zip(grid(shape, detail), _spans(shape, piece), strict=True)
    )


@cache
def places(shape: tuple[int, ...], piece: Piece, detail: Detail, finer: Detail) -> tuple[Tensor, ...]:
    """Return the index of the grid of a detail, within a piece, into the grid of a finer one."""
    within = [
        torch.searchsorted(index, mine + start)
        for index, mine, start in zip(grid(shape, finer), inside(shape, piece, detail), piece.start, strict=True)
    ]
    return tuple(torch.meshgrid(*within, indexing="ij")) if within else ()


@dataclass
class Kept:
    """Values that are kept of a whole tensor, assembled from its pieces.

    Attributes:
        squares: sum of squares; NaN if it is unknown, as for a tensor whose values ranks sum.
        projections: along each dim; none if all elements are in the grid.
        elements: the grid; NaN where no piece had it.
        covered: number of elements in the pieces.
    """

    shape: tuple[int, ...]
    detail: Detail
    squares: float
    projections: list[Tensor]
    elements: Tensor
    covered: int

    @classmethod
    def empty(cls, shape: tuple[int, ...], detail: Detail) -> "Kept":
        projections = (
            [torch.zeros(buckets(size, detail), dtype=torch.float64) for size in shape]
            if has_projections(shape, detail)
            else []
        )
        counts = tuple(len(index) for index in grid(shape, detail))
        return cls(shape, detail, 0.0, projections, torch.full(counts, torch.nan, dtype=torch.float64), 0)

    def add(self, piece: Piece, values: Tensor, partial: bool = False) -> None:
        """Add the values of a piece, as `keep` returns them for one sample; `partial` ones add to those there."""
        values = values.double()
        at = 1
        self.squares = torch.nan if partial else self.squares + float(values[0])
        for dim, projection in enumerate(self.projections):
            own = _own_buckets(self.shape[dim], piece.start[dim], piece.size[dim], self.detail)
            projection[own.start : own.stop] += values[at : at + len(own)]
            at += len(own)
        region = self.within(piece, self.detail)
        got = values[at:].reshape(region.shape)
        self.elements[places(self.shape, piece, self.detail, self.detail)] = (
            got + region.nan_to_num(0.0) if partial else got
        )
        self.covered += prod(piece.size)

    def within(self, piece: Piece, detail: Detail) -> Tensor:
        """Return the elements of a piece that are in the grid of a detail no finer than this one."""
        return self.elements[places(self.shape, piece, detail, self.detail)]

    def lowered(self, detail: Detail) -> "Kept":
        """Return what a lower detail keeps of a tensor that is here whole."""
        piece = Piece((0,) * len(self.shape), (0,) * len(self.shape), self.shape)
        made = Kept.empty(self.shape, detail)
        made.add(piece, keep(self.elements[None], self.shape, piece, detail)[0])
        return made

    @property
    def vectors(self) -> list[Tensor]:
        """Everything to compare: the grid, and the projection along each dim."""
        return [self.elements, *self.projections]

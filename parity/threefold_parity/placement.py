"""Placement of a rank's tensor in the tensor of the whole model: boxes of it, copies of it, parts of a sum."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from threefold_parity.text import UserError


@dataclass(frozen=True)
class Piece:
    """A box of a rank's tensor, and its position in the whole tensor.

    Attributes:
        local: offset within the rank's tensor, per dim; for a flat tensor that holds a box with more dims, the offset
            of the box's first element.
        start: offset within the whole tensor, per dim.
        size: size, per dim.
    """

    local: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        """Slices of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))

    def of(self, tensor: Tensor) -> Tensor:
        """Return the box of a rank's tensor, as a view where its strides allow."""
        if tensor.dim() != len(self.size):
            flat = tensor.reshape(-1)
            return flat[self.local[0] : self.local[0] + prod(self.size)].view(self.size)
        for dim, (start, size) in enumerate(zip(self.local, self.size, strict=True)):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, start, size)
        return tensor


@dataclass(frozen=True)
class Placement:
    """Position of a rank's tensor in the tensor of the whole model.

    Attributes:
        shape: shape of the whole tensor. For an activation, the dim of samples has the rank's size, or the whole
            batch's; it is ignored, since samples are identified by their content.
        pieces: boxes of the rank's tensor.
        copy: 0 if this rank's values represent the whole tensor; another number if they repeat those of a rank with 0;
            less is kept of such copies.
        partial: whether the whole tensor is the sum of the ranks' tensors.
        name: name in the whole model if the rank's name differs, as for a layer that a stage counts from 0.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    copy: int = 0
    partial: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        for piece in self.pieces:
            ends = [start + size for start, size in zip(piece.start, piece.size, strict=True)]
            if len(ends) != len(self.shape) or any(end > size for end, size in zip(ends, self.shape, strict=True)):
                raise UserError(
                    f"A piece of a placement starts at {piece.start} with size {piece.size}, but the whole tensor has "
                    f"the shape {self.shape}; give offsets and sizes within it, one for each dim."
                )


def fill(tensor: Tensor, placement: Placement, value: Tensor, name: str) -> None:
    """Fill a rank's tensor with its parts of the whole value; `name` is the parameter's name in messages.

    Raises:
        UserError: the value has another shape than the placement.
    """
    if tuple(value.shape) != placement.shape:
        raise UserError(
            f"The parameter {name} has the whole shape {placement.shape} in this run and {tuple(value.shape)} in the "
            "reference; compare runs of one model, or correct the adapter."
        )
    with torch.no_grad():
        for piece in placement.pieces:
            piece.of(tensor).copy_(value[piece.box])


def whole(tensor: Tensor, copy: int = 0, partial: bool = False, name: str | None = None) -> Placement:
    """Return the placement of a tensor that a rank holds whole."""
    shape = tuple(tensor.shape)
    return Placement(shape, (Piece((0,) * len(shape), (0,) * len(shape), shape),), copy, partial, name)


def shard(
    tensor: Tensor, dim: int, index: int, count: int, blocks: int = 1, copy: int = 0, name: str | None = None
) -> Placement:
    """Return the placement of one of `count` equal shards along a dim.

    Args:
        tensor: the shard.
        dim: dim of the cut; from the end if negative.
        index: number of the shard, from 0.
        count: number of shards.
        blocks: number of matrices stacked along the dim, each cut on its own, such as 2 for gate and up, or 3 for
            query, key and value.
        copy: as for `Placement`.
        name: as for `Placement`.

    Raises:
        UserError: the dim or the index does not exist, or the shard does not divide into the blocks.
    """
    shape = tuple(tensor.shape)
    dim = _dim_of(shape, dim, "parity.shard")
    if not 0 <= index < count:
        raise UserError(f"parity.shard got index {index} of {count} shards; use 0 to {count - 1}.")
    if blocks < 1 or shape[dim] % blocks:
        raise UserError(f"parity.shard got blocks {blocks}, which do not divide the {shape[dim]} of dim {dim}; use 1.")
    whole_shape = (*shape[:dim], shape[dim] * count, *shape[dim + 1 :])
    each = shape[dim] // blocks
    pieces = []
    for block in range(blocks):
        local, start, size = [0] * len(shape), [0] * len(shape), list(shape)
        local[dim], start[dim], size[dim] = block * each, (block * count + index) * each, each
        pieces.append(Piece(tuple(local), tuple(start), tuple(size)))
    return Placement(whole_shape, tuple(pieces), copy, name=name)


def fused(tensor: Tensor, sizes: Mapping[str, int], dim: int = 0, copy: int = 0) -> list[Placement]:
    """Return the placements of a tensor that concatenates several whole tensors of the model.

    Args:
        tensor: the tensor, such as the weight of one projection to queries, keys and values.
        sizes: by name in the whole model, in order, the size along the dim.
        dim: dim of the concatenation; from the end if negative.
        copy: as for `Placement`.

    Raises:
        UserError: the dim does not exist, or the sizes do not add up to that of the tensor.
    """
    shape, at, found = tuple(tensor.shape), 0, []
    dim = _dim_of(shape, dim, "parity.fused")
    if sum(sizes.values()) != shape[dim]:
        raise UserError(
            f"parity.fused got sizes that add up to {sum(sizes.values())}, but dim {dim} of the tensor has "
            f"{shape[dim]}; give the size of each part."
        )
    for name, size in sizes.items():
        part = (*shape[:dim], size, *shape[dim + 1 :])
        local = (*(0,) * dim, at, *(0,) * (len(shape) - dim - 1))
        found.append(Placement(part, (Piece(local, (0,) * len(shape), part),), copy, name=name))
        at += size
    return found


def _dim_of(shape: tuple[int, ...], dim: int, call: str) -> int:
    if not -len(shape) <= dim < len(shape):
        raise UserError(f"{call} got dim {dim} of a tensor with {len(shape)} dims; use {len(shape) - 1}.")
    return dim % len(shape)


def flat_range(shape: Sequence[int], start: int, stop: int, copy: int = 0, name: str | None = None) -> Placement:
    """Return the placement of a flat tensor with elements `start` to `stop` of a whole one in row-major order.

    Sharded optimizers that cut a flat buffer hold such ranges. They are boxes: a part of a row, whole rows, a part of
    a row, and so on for each dim.

    Raises:
        UserError: the range leaves the tensor.
    """
    shape = tuple(shape)
    if not 0 <= start <= stop <= prod(shape):
        raise UserError(f"parity.flat_range got {start} to {stop} of a tensor with {prod(shape)} elements; stay in it.")
    zeros = (0,) * (len(shape) - 1)
    pieces = tuple(Piece((offset - start, *zeros), at, size) for offset, at, size in _boxes(shape, start, stop))
    return Placement(shape, pieces, copy, name=name)


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Return the flat offset, start and size of the boxes that make up a range of flat offsets."""
    if start == stop:
        return []
    if len(shape) <= 1:
        return [(start, (start,) * len(shape), (stop - start,) * len(shape))]
    size_of_row = prod(shape[1:])

    def within(row: int, start: int, stop: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        base = row * size_of_row
        boxes = _boxes(shape[1:], start - base, stop - base)
        return [(base + offset, (row, *at), (1, *size)) for offset, at, size in boxes]

    first, last = -(-start // size_of_row), stop // size_of_row
    if first > last:  # within one row
        return within(first - 1, start, stop)
    found = within(first - 1, start, first * size_of_row) if start < first * size_of_row else []
    if last > first:
        found.append((first * size_of_row, (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    return found + (within(last, last * size_of_row, stop) if last * size_of_row < stop else [])

"""How one of our tensors is made of a file's: rows dealt in turn from one or several of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor

from threefold.huggingface.files import TensorFiles

PIECE_BYTES: Final = 16 << 20
"""Most that is read at once, and stored as one piece."""
SMALL: Final = 1 << 18
"""Bytes of a tensor that is stored as one piece."""
PARTS: Final = 8
"""Pieces of a tensor that is not small, so that each of as many ranks finds its own part."""


@dataclass(frozen=True)
class Box:
    """Rows and columns of a tensor, each from a first to an end; one of one dim has a single column."""

    rows: tuple[int, int]
    columns: tuple[int, int]


@dataclass(frozen=True)
class Part:
    """Rows of a tensor of the files.

    Attributes:
        name: the tensor's.
        rows: how many go into each group of ours.
        start: the first of its rows that belongs to this part.
        index: which of the tensors stacked in it, where it is a stack.
    """

    name: str
    rows: int = 1
    start: int = 0
    index: int | None = None


@dataclass(frozen=True)
class Weight:
    """One of our tensors, or one expert's part of a stack: groups of rows, each with some rows of every part in order.

    Attributes:
        name: ours.
        shape: ours; of one expert's part, without the dim of the stack.
        parts: what the rows of a group come from.
        transposed: whether the files hold it the other way round, as [in, out].
        expert: which of a stack, if it is one.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    transposed: bool = False
    expert: int | None = None

    @property
    def group(self) -> int:
        """Rows of a group."""
        return sum(part.rows for part in self.parts)

    def theirs(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each tensor of the files that it is made of; a stack by its name alone, without its dim."""
        groups, rest = self.shape[0] // self.group, self.shape[1:]
        rows: dict[str, int] = {}
        for part in self.parts:
            rows[part.name] = rows.get(part.name, 0) + part.rows * groups
        shapes = {name: (count, *rest) for name, count in rows.items()}
        return {name: shape[::-1] for name, shape in shapes.items()} if self.transposed else shapes

    def boxes(self, itemsize: int, by_columns: bool) -> Iterator["Box"]:
        """What cuts the tensor into pieces of at most `PIECE_BYTES` and, where it is not small, at least `PARTS`.

        Args:
            itemsize: bytes of an element.
            by_columns: whether the last of two dims is cut instead of the first; of that whole groups alone are.
        """
        size = prod(self.shape) * itemsize
        rows, columns = self.shape[0], self.shape[-1] if len(self.shape) > 1 else 1
        unit, length = (1, columns) if by_columns else (self.group, rows)
        limit = PIECE_BYTES if size <= SMALL else min(PIECE_BYTES, -(-size // PARTS))
        step = max(1, limit * length // (size * unit)) * unit
        for first in range(0, length, step):
            span = (first, min(first + step, length))
            yield Box((0, rows), span) if by_columns else Box(span, (0, columns))

    def read(self, files: TensorFiles, box: "Box") -> Tensor:
        """A box of ours.

        Raises:
            UserError: the files cannot be read.
        """
        groups = range(box.rows[0] // self.group, box.rows[1] // self.group)
        read = [
            files.read(
                part.name,
                (part.start + groups.start * part.rows, part.start + groups.stop * part.rows),
                box.columns,
                part.index,
                self.transposed,
            )
            for part in self.parts
        ]
        if len(read) == 1:
            return read[0].contiguous()
        shares = zip(self.parts, read, strict=True)
        return torch.cat([rows.unflatten(0, (len(groups), part.rows)) for part, rows in shares], dim=1).flatten(0, 1)

    def split(self, ours: Tensor) -> dict[str, Tensor]:
        """The tensors of the files by name, from the whole of ours."""
        ours = ours if self.expert is None else ours[self.expert]
        groups = ours.unflatten(0, (-1, self.group)).split([part.rows for part in self.parts], dim=1)
        rows: dict[str, list[Tensor]] = {}
        for part, share in zip(self.parts, groups, strict=True):
            rows.setdefault(part.name, []).append(share.flatten(0, 1))
        whole = {name: torch.cat(shares) if len(shares) > 1 else shares[0] for name, shares in rows.items()}
        return {name: tensor.t() for name, tensor in whole.items()} if self.transposed else whole


def dealt(name: str, shape: Sequence[int], parts: Sequence[Part], expert: int | None = None) -> Weight:
    """A weight from several parts."""
    return Weight(name, tuple(shape), tuple(parts), expert=expert)

"""Parameters read from Hugging Face's files box by box, and split into the tensors of such files."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor

from threefold.huggingface.tensor_files import TensorFiles
from threefold.models.hf.weights import WeightMap

BOX_BYTES: Final = 16 << 20
"""Most that is read at once, and stored as one piece."""
SMALL: Final = 1 << 18
"""Bytes of a tensor that is stored as one piece."""
BOXES: Final = 8
"""Pieces of a tensor that is not small, so that each of as many ranks finds its own shard."""


@dataclass(frozen=True)
class Box:
    """Rows and columns of a tensor, each from a first to an end; one of one dim has a single column."""

    rows: tuple[int, int]
    columns: tuple[int, int]


def boxes(weight: WeightMap, itemsize: int, by_columns: bool) -> Iterator[Box]:
    """Divides a parameter into boxes of at most `BOX_BYTES` and, where it is not small, at least `BOXES` of them.

    Args:
        weight: the parameter.
        itemsize: bytes of an element.
        by_columns: whether the last of two dims is cut instead of the first; of that only whole groups are.
    """
    size = prod(weight.shape) * itemsize
    rows, columns = weight.shape[0], weight.shape[-1] if len(weight.shape) > 1 else 1
    unit, length = (1, columns) if by_columns else (weight.group, rows)
    limit = BOX_BYTES if size <= SMALL else min(BOX_BYTES, -(-size // BOXES))
    step = max(1, limit * length // (size * unit)) * unit
    for first in range(0, length, step):
        span = (first, min(first + step, length))
        yield Box((0, rows), span) if by_columns else Box(span, (0, columns))


def read_box(weight: WeightMap, files: TensorFiles, box: Box) -> Tensor:
    """A box of a parameter.

    Raises:
        UserError: the files cannot be read.
    """
    groups = range(box.rows[0] // weight.group, box.rows[1] // weight.group)
    read = [
        files.read(
            source.name,
            (source.start + groups.start * source.rows, source.start + groups.stop * source.rows),
            box.columns,
            source.index,
            weight.transposed,
        )
        for source in weight.sources
    ]
    if len(read) == 1:
        return read[0].contiguous()
    parts = zip(weight.sources, read, strict=True)
    return torch.cat([rows.unflatten(0, (len(groups), source.rows)) for source, rows in parts], dim=1).flatten(0, 1)


def split(weight: WeightMap, parameter: Tensor) -> dict[str, Tensor]:
    """The tensors of the files by name, from a whole parameter."""
    matrix = parameter if weight.expert is None else parameter[weight.expert]
    groups = matrix.unflatten(0, (-1, weight.group)).split([source.rows for source in weight.sources], dim=1)
    rows: dict[str, list[Tensor]] = {}
    for source, part in zip(weight.sources, groups, strict=True):
        rows.setdefault(source.name, []).append(part.flatten(0, 1))
    whole = {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in rows.items()}
    return {name: tensor.t() for name, tensor in whole.items()} if weight.transposed else whole

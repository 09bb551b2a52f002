"""Which part of a whole tensor a rank holds, dim by dim."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Positions(Protocol):
    """Which indices of a dim of a whole tensor a rank holds."""

    def indices(self, size: int, device: torch.device) -> Tensor:
        """Their positions (int64 [size]) in the whole dim, for a local dim of `size`."""
        ...

    def whole(self, size: int) -> int:
        """Size of the whole dim."""
        ...


@dataclass(frozen=True)
class Slice:
    """A run of indices: from `start`, of `length` in all (None: as many as are held)."""

    start: int = 0
    length: int | None = None

    def indices(self, size: int, device: torch.device) -> Tensor:
        return torch.arange(self.start, self.start + size, device=device)

    def whole(self, size: int) -> int:
        return size if self.length is None else self.length


ALL = Slice()
"""The whole dim."""


def row_major(shape: Sequence[int], parts: Sequence[Positions], device: torch.device) -> Tensor:
    """Row-major positions (int64, flat) that a local tensor's elements have in the whole one, `parts` of each dim."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for size, part in zip(shape, parts, strict=True):
        index = (index.unsqueeze(-1) * part.whole(size) + part.indices(size, device)).flatten()
    return index

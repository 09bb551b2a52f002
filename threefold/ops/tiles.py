"""Tiles of causal attention: some queries, and the keys that they attend to; whole ones, where no room makes finer."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from threefold.ops.kernels import AttentionMask

Ids: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tile:
    """Some queries, and every key that any of them attends to; `ids` are documents by position, if it has several."""

    rows: slice
    queries: range
    keys: range
    window: int
    ids: Ids | None = None

    @property
    def crosses_window(self) -> bool:
        """Whether some key is too far back for some query."""
        return 0 < self.window <= self.queries.stop - 1 - self.keys.start

    @property
    def is_causal(self) -> bool:
        """Whether it has as many keys as queries and only the causal mask."""
        return self.queries == self.keys and not self.crosses_window and self.ids is None

    @property
    def is_full(self) -> bool:
        """Whether no key is masked."""
        return self.keys.stop - 1 <= self.queries.start and not self.crosses_window and self.ids is None

    def hidden(self, device: torch.device) -> Tensor:
        """Return the mask, bool [queries, keys]: True for keys that a query does not attend to."""
        ahead = self.queries.start - self.keys.start
        hidden = torch.ones(len(self.queries), len(self.keys), dtype=torch.bool, device=device).tril_(ahead)
        if self.crosses_window:
            hidden.triu_(ahead + 1 - self.window)
        hidden.logical_not_()
        if self.ids is not None:
            ids = torch.from_numpy(self.ids)
            apart = ids[self.queries.start : self.queries.stop, None] != ids[self.keys.start : self.keys.stop]
            hidden |= apart.to(device)
        return hidden

    @property
    def shape(self) -> tuple[int, int, int]:
        """Key that is equal for tiles of one `AttentionMask` with equal masks, if `ids` is None."""
        return len(self.queries), len(self.keys), self.queries.start - self.keys.start


def whole_tiles(rows: int, queries: range, keys: range, mask: AttentionMask, longest: int | None = None) -> list[Tile]:
    """Return tiles as `cpu.tiles.tiles` yields them: one of all rows, or one of each row that has documents."""
    if mask.documents is None:
        return [Tile(slice(0, rows), queries, keys, mask.window)]
    documents = mask.documents.numpy(force=True)
    return [Tile(slice(row, row + 1), queries, keys, mask.window, documents[row]) for row in range(rows)]


def hidden_keys(rows: int, queries: int, keys: int, mask: AttentionMask, device: torch.device) -> Tensor:
    """Return bool [rows or 1, 1, queries, keys]: whether each of the last `queries` positions does not see a key."""
    tiles = whole_tiles(rows, range(keys - queries, keys), range(keys), mask)
    return torch.stack([tile.hidden(device) for tile in tiles]).unsqueeze(1)

"""Fingerprints of the rows of a batch, by which the samples of two runs are matched, with their padding and without."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import Tensor

from threefold_parity.adapters import local
from threefold_parity.placement import Piece, Placement

IGNORED: Final = -100
"""Label of a position without a loss, as in `torch.nn.functional.cross_entropy`."""


def fingerprints(rows: Tensor) -> list[str]:
    """Return a fingerprint of each row of a batch; that of tokens is independent of their type."""
    mine = local(rows).detach().cpu()
    if not mine.is_floating_point():
        mine = mine.long()
    flat = mine.reshape(mine.shape[0], -1).contiguous() if mine.dim() else mine.reshape(1, 1)
    return [blake2b(row.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest() for row in flat]


class Padding:
    """Padding of a step's rows, by the fingerprints of these.

    Attributes:
        unpadded: fingerprint of a row → that without its padding, where they differ.
        lengths: lengths of the rows.
    """

    def __init__(self) -> None:
        self.unpadded: dict[str, str] = {}
        self.lengths: set[int] = set()
        self._kept: dict[str, Tensor] = {}  # positions of padded rows that are no padding

    def note(self, names: Sequence[str], rows: Tensor, mask: Any = None, labels: Any = None) -> None:
        """Note which positions of the rows of tokens are padding.

        They are those where the attention mask is 0, or without a mask what follows the last label that counts. A row
        in which nothing would be left counts as a whole, as do rows of which no mask or label says anything.
        """
        self.lengths.add(rows.shape[-1] if rows.dim() > 1 else 0)
        if rows.is_floating_point() or rows.dim() != 2:
            return
        for given in (mask, labels):
            if isinstance(given, Tensor) and given.shape == rows.shape:
                valid = local(given).detach().cpu()
                kept = valid != 0 if given is mask else (valid != IGNORED).flip(1).cumsum(1).flip(1) > 0
                break
        else:
            return
        for name, row, own in zip(names, local(rows).detach().cpu(), kept, strict=True):
            if bool(own.any()) and not bool(own.all()):
                self._kept[name] = own
                (self.unpadded[name],) = fingerprints(row[own][None])

    def without(
        self, rows: Tensor, placement: Placement, samples: tuple[str, ...]
    ) -> Iterator[tuple[Tensor, Placement, tuple[str, ...]]]:
        """Yield the rows of an activation, with the placement and the samples of each part: padded ones at the
        positions that are no padding, so that they are the same whatever length a batch is padded to.

        Rows without padding stay together, and so do all rows of an activation without a dim of positions.
        """
        own, shape = [self._kept.get(sample) for sample in samples], placement.shape
        length = next((len(kept) for kept in own if kept is not None), -1)
        dims = [dim for dim in range(1, max(2, len(shape) - 1)) if len(shape) > 1 and shape[dim] == length]
        if len(dims) != 1 or rows.dim() != len(shape):
            yield rows, placement, samples
            return
        if others := [at for at, kept in enumerate(own) if kept is None]:
            yield rows[others], placement, tuple(samples[at] for at in others)
        for at, kept in enumerate(own):
            if kept is not None:
                yield *_at(rows[at : at + 1], placement, dims[0], kept), (samples[at],)


def _at(rows: Tensor, placement: Placement, dim: int, kept: Tensor) -> tuple[Tensor, Placement]:
    """Return rows and their placement at the `kept` indices of a dim of the whole tensor alone."""
    chosen: list[Tensor] = []
    pieces: list[Piece] = []
    local_start = 0
    for piece in placement.pieces:
        start = piece.start[dim]
        indices = kept[start : start + piece.size[dim]].nonzero().flatten()
        if not len(indices):
            continue
        starts = local_start, int(kept[:start].sum()), len(indices)
        places = zip((piece.local, piece.start, piece.size), starts, strict=True)
        pieces.append(Piece(*((*place[:dim], value, *place[dim + 1 :]) for place, value in places)))
        chosen.append(indices + piece.local[dim])
        local_start += len(indices)
    shape = (*placement.shape[:dim], int(kept.sum()), *placement.shape[dim + 1 :])
    indices = torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.int64)
    return rows.index_select(dim, indices.to(rows.device)), replace(placement, shape=shape, pieces=tuple(pieces))

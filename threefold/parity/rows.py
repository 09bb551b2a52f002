"""Fingerprints of the rows of a batch, by which the samples of two runs are matched, with their padding and without."""

from hashlib import blake2b
from typing import Any, Final

import torch
from torch import Tensor

from threefold.parity.adapters import local

IGNORED: Final = -100
"""Label of a position without a loss, as in `torch.nn.functional.cross_entropy`."""


def fingerprints(rows: Tensor) -> list[str]:
    """Return a fingerprint of each row of a batch; that of tokens is independent of their type."""
    mine = local(rows).detach().cpu()
    if not mine.is_floating_point():
        mine = mine.long()
    flat = mine.reshape(mine.shape[0], -1).contiguous() if mine.dim() else mine.reshape(1, 1)
    return [blake2b(row.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest() for row in flat]


def unpadded_fingerprints(rows: Tensor, mask: Any = None, labels: Any = None) -> list[str]:
    """Return a fingerprint of each row of tokens without its padding; the usual ones if no padding is known.

    Padding is where the attention mask is 0, or without a mask what follows the last label that counts.
    """
    kept = None
    for given in (mask, labels):
        if kept is None and isinstance(given, Tensor) and given.shape == rows.shape and rows.dim() == 2:
            valid = local(given).detach().cpu()
            kept = valid != 0 if given is mask else (valid != IGNORED).flip(1).cumsum(1).flip(1) > 0
    if kept is None or rows.is_floating_point():
        return fingerprints(rows)
    tokens = local(rows).detach().cpu()
    return [
        fingerprints((row[own] if bool(own.any()) else row)[None])[0] for row, own in zip(tokens, kept, strict=True)
    ]

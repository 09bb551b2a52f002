"""What a record keeps of a tensor that one rank holds whole."""

import torch

from threefold.parity.placement import whole
from threefold.parity.sketch import Detail, Kept, keep


def kept_of(tensor: torch.Tensor, detail: Detail) -> Kept:
    shape = tuple(tensor.shape)
    found = Kept.empty(shape, detail)
    (piece,) = whole(tensor).pieces
    found.add(piece, keep(tensor[None], shape, piece, detail)[0])
    return found

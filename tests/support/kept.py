"""What a record keeps of a tensor that one rank holds whole, and records with other facts."""

import json
from pathlib import Path

import torch

from threefold.checksums import seal
from threefold.parity.placement import whole
from threefold.parity.sketch import Detail, Kept, keep


def kept_of(tensor: torch.Tensor, detail: Detail) -> Kept:
    shape = tuple(tensor.shape)
    found = Kept.empty(shape, detail)
    (piece,) = whole(tensor).pieces
    found.add(piece, keep(tensor[None], shape, piece, detail)[0])
    return found


def rewrite(record: Path, **facts: object) -> None:
    """Change facts of rank 0 of a record."""
    path = record / "rank-00000.json"
    before = {name: value for name, value in json.loads(path.read_text()).items() if name != "checksum"}
    path.write_text(json.dumps(seal({**before, **facts})))

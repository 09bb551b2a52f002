"""Initial weights that a reference run passes to a candidate as whole tensors, however either shards them."""

import json
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from threefold.errors import UserError
from threefold.files import shown
from threefold.parity.placement import Piece, Placement


def write_weights(
    folder: Path, rank: int, world_size: int, parameters: Iterable[tuple[str, list[tuple[Tensor, Placement]]]]
) -> None:
    """Write a rank's parts of the weights; copies of what another rank writes are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    index: list[list[Any]] = []
    for name, parts in parameters:
        for tensor, placement in parts:
            for piece in () if placement.copy else placement.pieces:
                key = str(len(index))
                tensors[key] = piece.of(tensor).detach().cpu().contiguous().clone()
                index.append([placement.name or name, list(placement.shape), list(piece.start), list(piece.size)])
    path = folder / f"weights-{rank:05d}.safetensors"
    staged = path.with_suffix(".tmp")
    save_file(tensors, staged, metadata={"index": json.dumps(index), "world_size": str(world_size)})
    staged.replace(path)


def read_weights(folder: Path) -> Callable[[str], Tensor]:
    """Return a function from a parameter's name to its whole value.

    Raises:
        UserError: now or later, if a file is missing or damaged, or the reference has no parameter of that name.
    """
    files = sorted(folder.glob("weights-*.safetensors"))
    parts: dict[str, list[tuple[Path, str, tuple[int, ...], Piece]]] = {}
    try:
        for path in files:
            with safe_open(path, "pt") as file:
                facts = file.metadata() or {}
            if int(facts["world_size"]) != len(files):
                raise KeyError("world_size")
            for key, (name, shape, start, size) in enumerate(json.loads(facts["index"])):
                piece = Piece(tuple(start), tuple(start), tuple(size))
                parts.setdefault(name, []).append((path, str(key), tuple(shape), piece))
    except (SafetensorError, OSError, KeyError, ValueError, TypeError):
        parts = {}
    if not parts:
        raise UserError(
            f"The initial weights in {shown(folder)} are missing or cut; let the reference run write them "
            "(THREEFOLD_PARITY_SAVE) and end its first step."
        )

    def read(name: str) -> Tensor:
        if name not in parts:
            raise UserError(
                f"The reference has no parameter {name}; it has {', '.join(sorted(parts)[:3])}, …: give both runs one "
                "model, or let the adapter return the reference's names."
            )
        found: list[Tensor] = []
        for path, key, _, _ in parts[name]:
            with safe_open(path, "pt") as file:
                found.append(file.get_tensor(key))
        value = torch.empty(parts[name][0][2], dtype=found[0].dtype)
        for (_, _, _, piece), part in zip(parts[name], found, strict=True):
            value[piece.box] = part
        lacking = value.numel() - sum(prod(piece.size) for piece in {piece for *_, piece in parts[name]})
        if lacking > 0:
            raise UserError(
                f"The initial weights in {shown(folder)} lack {lacking:,} elements of {name}; let every rank of the "
                "reference write its parts, and its adapter place them all."
            )
        return value

    return read

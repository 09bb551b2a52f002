"""Tensors of a checkpoint as files of other libraries: safetensors, `torch.save`, and `torch.distributed.checkpoint`.

Whole tensors under the names that they have in the unsplit model. The latter two write a file from tensors that are all
in memory; here they are mapped from a scratch file, so that memory need not hold them.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

from threefold.checkpoint.format.safetensors_files import CODES, Planned, Shards
from threefold.checkpoint.tensor_names import MODEL, OPTIMIZER
from threefold.checkpoint.tensors import save_tensors_alone
from threefold.checkpoint.tools.tensor_source import TensorSource
from threefold.errors import UserError
from threefold.files import shown

_ALIGNMENT: Final = 64


def write_safetensors(source: TensorSource, folder: Path, shard_bytes: int) -> list[str]:
    """model.safetensors with the weights, and optimizer.safetensors with the states as `NAME.STATE`, or several of each
    with an index; returns their names.

    Raises:
        UserError: safetensors has no name for a dtype.
    """
    names = []
    for prefix, stem in ((MODEL, "model"), (OPTIMIZER, "optimizer")):
        stored = [name for name in source.planned if name.startswith(prefix)]
        if not stored:
            continue
        planned = []
        for name in stored:
            tensor = source.planned[name]
            if tensor.dtype not in CODES:
                raise UserError(
                    f"{shown(name)} is {tensor.dtype}, which safetensors does not have; use --format torch."
                )
            planned.append(Planned(name.removeprefix(prefix), tensor.shape, tensor.dtype))
        with Shards(folder, planned, shard_bytes, stem) as shards:
            for name in stored:
                shards.write({name.removeprefix(prefix): source.read(name)})
            shards.finish()
        names += shards.names
    return names


def write_torch(source: TensorSource, folder: Path) -> list[str]:
    """model.pt, a state dict, and optimizer.pt, a dict of states by name of the weight; returns their names.

    Both open with `weights_only=True`.
    """
    weights = [name for name in source.planned if name.startswith(MODEL)]
    states = [name for name in source.planned if name.startswith(OPTIMIZER)]
    scratch = folder / "scratch"
    model = {name.removeprefix(MODEL): tensor for name, tensor in _mapped(source, weights, scratch)}
    torch.save(model, folder / "model.pt")
    del model
    names = ["model.pt"]
    if states:
        optimizer: dict[str, dict[str, Tensor]] = {}
        for name, tensor in _mapped(source, states, scratch):
            weight, _, state = name.removeprefix(OPTIMIZER).rpartition(".")
            optimizer.setdefault(weight, {})[state] = tensor
        torch.save(optimizer, folder / "optimizer.pt")
        names.append("optimizer.pt")
    scratch.unlink(missing_ok=True)
    return names


def write_dcp(source: TensorSource, folder: Path) -> list[str]:
    """A checkpoint of `torch.distributed.checkpoint`, with the names of ours; returns the names of its files."""
    before, scratch = set(folder.iterdir()), folder / "scratch"
    tensors = dict(_mapped(source, source.planned, scratch))
    save_tensors_alone(tensors, folder, FileSystemWriter(folder))
    scratch.unlink()
    return sorted(path.name for path in set(folder.iterdir()) - before)


def _mapped(source: TensorSource, names: Iterable[str], scratch: Path) -> list[tuple[str, Tensor]]:
    """The tensors, in a file that is mapped into memory, each with a storage of its own."""
    places: list[tuple[str, int, int]] = []
    scratch.unlink(missing_ok=True)
    with scratch.open("wb") as file:
        for name in names:
            content: Any = source.read(name).reshape(-1).view(torch.uint8).numpy()
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            places.append((name, file.tell(), len(content)))
            file.write(content.data)
        file.write(b"\0")  # an empty file cannot be mapped
    mapped = np.memmap(scratch, dtype=np.uint8, mode="r+")
    found = []
    for name, begin, size in places:
        planned = source.planned[name]
        flat = torch.from_numpy(mapped[begin : begin + size]).view(planned.dtype)
        found.append((name, flat.reshape(planned.shape)))
    return found

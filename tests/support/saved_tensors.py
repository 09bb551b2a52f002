"""Measure the bytes that autograd saves in a forward pass, to check the formulas of `threefold.planner.activations`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from threefold.torch_private.tensors import storage_key


@dataclass
class Saved:
    """Storages that autograd saved; each counts once however many tensors share it."""

    _storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> None:
        self._storages[storage_key(tensor)] = tensor.untyped_storage()  # held, so that its key stays unique

    @property
    def nbytes(self) -> int:
        """Bytes held now, without storages that were freed in the meantime (and are refilled when needed)."""
        return sum(storage.nbytes() for storage in self._storages.values())


@contextmanager
def recording_saved(parameters: Iterable[Tensor]) -> Iterator[Saved]:
    """Count what a forward pass saves, without the given parameters.

    Keeps references to the counted storages until the result is dropped.
    """
    known = {storage_key(parameter) for parameter in parameters}
    saved = Saved()

    def pack(tensor: Tensor) -> Tensor:
        if storage_key(tensor) not in known:
            saved.add(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved

"""Counts the bytes that autograd keeps of a forward pass: what `plan.activations` has formulas for."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from threefold.torch_private.tensors import storage_key


@dataclass
class Saved:
    """The memory of tensors that autograd saved; counted once however many tensors share it."""

    _storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> None:
        self._storages[storage_key(tensor)] = tensor.untyped_storage()  # held, so that no other takes its place

    @property
    def nbytes(self) -> int:
        """The memory held now, without storages that were freed meanwhile (and are filled again when needed)."""
        return sum(storage.nbytes() for storage in self._storages.values())


@contextmanager
def recording_saved(parameters: Iterable[Tensor]) -> Iterator[Saved]:
    """Count what the forward pass of a block keeps, without the given parameters.

    Refers to what it counts until the result is dropped.
    """
    known = {storage_key(parameter) for parameter in parameters}
    saved = Saved()

    def pack(tensor: Tensor) -> Tensor:
        if storage_key(tensor) not in known:
            saved.add(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved

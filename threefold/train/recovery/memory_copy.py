"""One copy of a rank's state in a file in memory, which outlives the process of the rank.

    record: step, bytes of the tensors, bytes of the index, checksum of all that
    tensors, each at a multiple of `ALIGNMENT`
    index: JSON with the facts, and name, dtype, shape and place of each tensor

A process may be killed at any moment, so a copy counts only where its checksum is right. The record is made invalid
before anything else of the copy changes, and written last.
"""

import json
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from threefold.checksums import checksum_of_blocks

ALIGNMENT: Final = 64
_RECORD: Final = struct.Struct("<qqq48s")
_START: Final = mmap.PAGESIZE
_INVALID: Final = -1


class MemoryCopy:
    """A copy in the file at `path`; a file that is empty holds none.

    Args:
        path: of a file in memory (`memory_files`).

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map: mmap.mmap | None = None

    def close(self) -> None:
        """Close the file; its content stays."""
        self._map = None  # unmapped with the last tensor that is a view of it
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    @property
    def step(self) -> int | None:
        """The number of updates after which it was made, as the record says; None where there is none."""
        found = self._record()
        return found[0] if found else None

    def is_whole(self) -> bool:
        """Whether it is as it was written, by its checksum."""
        found = self._record()
        if found is None:
            return False
        step, data, index, checksum = found
        size = os.fstat(self._descriptor).st_size
        if min(step, data, index) < 0 or _START + data + index > size:
            return False
        return self._checksum(step, data, index) == checksum

    def facts(self) -> dict[str, Any]:
        """The facts of a whole copy."""
        return dict(self._index()["facts"])

    def write(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Replace the copy.

        Args:
            step: updates made.
            tensors: this rank's, by name.
            facts: what else belongs to the state, as JSON has it.

        Raises:
            OSError: there is no room for it.
        """
        places, end = {}, 0
        for name, tensor in tensors.items():
            places[name] = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        index = json.dumps({"facts": dict(facts), "tensors": places}).encode()
        held = self._grown(_START + end + len(index))
        _RECORD.pack_into(held, 0, _INVALID, 0, 0, b"")
        for name, tensor in tensors.items():
            self._place(*places[name]).copy_(tensor)
        held[_START + end : _START + end + len(index)] = index
        _RECORD.pack_into(held, 0, step, end, len(index), self._checksum(step, end, len(index)))

    def read(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Fill tensors in place from a whole copy.

        Args:
            tensors: by name; those that the copy does not have stay as they are.

        Returns:
            the names of those that were filled.

        Raises:
            ValueError: the copy has a tensor that is not among them, or in another shape or dtype.
        """
        places = self._index()["tensors"]
        for name, (dtype, shape, start) in places.items():
            target = tensors.get(name)
            if target is None or list(target.shape) != shape or str(target.dtype) != f"torch.{dtype}":
                raise ValueError(f"the state in memory has {name} of shape {shape}, which this rank does not")
            target.copy_(self._place(dtype, shape, start))
        return set(places)

    def discard(self) -> None:
        """Make it one that does not count."""
        if self._record() is not None:
            _RECORD.pack_into(self._mapped(), 0, _INVALID, 0, 0, b"")

    def _place(self, dtype: str, shape: list[int], start: int) -> Tensor:
        kind = getattr(torch, dtype)
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(self._mapped(), dtype=kind, count=count, offset=_START + start).view(shape)

    def _index(self) -> Any:
        found = self._record()
        assert found is not None
        _, data, index, _ = found
        return json.loads(self._mapped()[_START + data : _START + data + index])

    def _record(self) -> tuple[int, int, int, bytes] | None:
        if self._map is None and os.fstat(self._descriptor).st_size < _START:
            return None
        step, data, index, checksum = _RECORD.unpack_from(self._mapped())
        return None if step < 0 else (step, data, index, checksum.rstrip(b"\0"))

    def _checksum(self, step: int, data: int, index: int) -> bytes:
        with memoryview(self._mapped()) as held:
            content = held[_START : _START + data + index]
            return checksum_of_blocks((struct.pack("<qqq", step, data, index), content)).encode()

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
        return self._map

    def _grown(self, size: int) -> mmap.mmap:
        """The memory, of `size` bytes at least."""
        if os.fstat(self._descriptor).st_size < size:
            self._map = None
            os.posix_fallocate(self._descriptor, 0, size)  # fails here, and not by a signal where it is written
        return self._mapped()

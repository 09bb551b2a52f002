"""Tensors that are read piece by piece while a checkpoint is written, so that none is in memory as a whole:
`format.storage.Writer` frees each piece before it reads the next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from threefold.torch_private.distributed import PiecewiseTensor


@dataclass(frozen=True)
class TensorPiece:
    """A box of a tensor: where it starts, its sizes, and what reads it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]


class StreamedTensor(PiecewiseTensor):
    """A tensor without storage that implements torch.distributed.checkpoint's protocol for sharded tensors.

    Each piece is stored as its own chunk, so that loading a shard reads only the pieces that it overlaps.
    """

    _pieces: dict[torch.Size, TensorPiece]

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[TensorPiece]) -> Self:
        """A tensor that `pieces` cover without overlap."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(cls)
        tensor._pieces = {torch.Size(piece.offsets): piece for piece in pieces}
        return tensor

    def write_items(self, name: str) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        items = []
        for offsets, piece in self._pieces.items():
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(piece.sizes))
            data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
            items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def piece(self, index: MetadataIndex) -> Tensor:
        offsets: Any = index.offset
        return self._pieces[offsets].read()

"""Shards that two mesh axes cut along the same dim, described to torch.distributed.checkpoint.

A weight that tensor parallelism and ZeRO both shard by rows is a `DTensor` with a `_StridedShard`. Where its rows do
not divide evenly, torch 2.13 computes other bounds for such a shard than `fully_shard` gave it, and parts of the
checkpoint would be missing or doubled. So these shards state their own offsets.
"""

from typing import Any, Self, TypeGuard

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from threefold.parallel.parameter import offset
from threefold.torch_private.distributed import PiecewiseTensor, StridedPlacement


def is_strided(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether two axes cut the tensor along one dim."""
    return isinstance(tensor, DTensor) and any(
        isinstance(placement, StridedPlacement) for placement in tensor.placements
    )


class StridedShard(PiecewiseTensor):
    """This rank's shard, its memory shared, with torch.distributed.checkpoint's protocol for sharded tensors."""

    _whole: torch.Size
    _chunk: ChunkStorageMetadata
    _shard: Tensor

    @classmethod
    def of(cls, tensor: DTensor) -> Self:
        """The part of a detached `tensor` that this rank holds."""
        shard = tensor.to_local()
        part = shard.as_subclass(cls)
        part._whole, part._shard = tensor.shape, shard
        part._chunk = ChunkStorageMetadata(offsets=torch.Size(offset(tensor)), sizes=shard.shape)
        return part

    def size(self, dim: int | None = None) -> Any:
        """Of the whole tensor, as a `DTensor`'s."""
        return self._whole if dim is None else self._whole[dim]

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [self._chunk]

    def write_items(self, name: str) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._shard)
        data = TensorWriteData(chunk=self._chunk, properties=properties, size=self._whole)
        return [WriteItem(MetadataIndex(name, self._chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def piece(self, index: MetadataIndex) -> Tensor:
        return self._shard

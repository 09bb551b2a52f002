"""Saving and loading of tensors through torch.distributed.checkpoint, including shards that two axes cut along one dim.

A weight that tensor parallelism and ZeRO both shard by rows is a `DTensor` with a `_StridedShard`. If its rows do not
divide evenly, torch 2.13 computes other bounds for it than `fully_shard` used, and parts of the checkpoint would be
missing or duplicated. `StridedShard` therefore states its own offsets.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Self, TypeGuard

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.storage import Reader, Writer, stored_index
from threefold.comm.axis import Axis
from threefold.comm.heartbeat import Heartbeat
from threefold.errors import UserError
from threefold.parallel.parameter import offset
from threefold.torch_private.distributed import PiecewiseTensor, StridedPlacement


def is_strided(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether two mesh axes shard the tensor along one dim."""
    return isinstance(tensor, DTensor) and any(
        isinstance(placement, StridedPlacement) for placement in tensor.placements
    )


class StridedShard(PiecewiseTensor):
    """This rank's shard, sharing its memory, with torch.distributed.checkpoint's protocol for sharded tensors."""

    _whole: torch.Size
    _chunk: ChunkStorageMetadata
    _shard: Tensor

    def __new__(cls, tensor: DTensor) -> Self:
        """Make the part of a detached `tensor` that this rank holds."""
        shard = tensor.to_local()
        self = shard.as_subclass(cls)
        self._whole, self._shard = tensor.shape, shard
        self._chunk = ChunkStorageMetadata(offsets=torch.Size(offset(tensor)), sizes=shard.shape)
        return self

    def size(self, dim: int | None = None) -> Any:
        """Return the size of the whole tensor, like a `DTensor`."""
        return self._whole if dim is None else self._whole[dim]

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [self._chunk]

    def write_items(self, name: str) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._shard)
        data = TensorWriteData(chunk=self._chunk, properties=properties, size=self._whole)
        return [WriteItem(MetadataIndex(name, self._chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def piece(self, index: MetadataIndex) -> Tensor:
        return self._shard


def save_tensors(tensors: Mapping[str, Tensor], folder: Path, world: Axis | None = None) -> None:
    """Write tensors to `folder`, durably. Collective over the world.

    Args:
        tensors: a `DTensor` if sharded, the same plain tensor on every rank if replicated. A rank passes only the
            tensors that it holds.
        folder: an empty folder shared by all ranks.
        world: all ranks; provides the heartbeat of this one.

    Raises:
        OSError: on every rank, if a rank cannot write.
    """
    try:
        with _quiet(), _waiting(world):
            dcp.save(detached(tensors), storage_writer=Writer(folder, _heartbeat(world)))
    except CheckpointException as error:
        raise OSError(_reason(error)) from error


def save_tensors_alone(tensors: Mapping[str, Tensor], folder: Path, writer: dcp.StorageWriter | None = None) -> None:
    """Write tensors to an empty `folder` outside any process group, reading streamed tensors as they are written.

    Args:
        writer: storage writer of another format; None for Threefold's own.

    Raises:
        OSError: the tensors cannot be written.
        UserError: a streamed tensor cannot be read.
    """
    try:
        with _quiet():
            dcp.save(dict(tensors), storage_writer=writer or Writer(folder, Heartbeat()), no_dist=True)
    except CheckpointException as error:
        _let_through(error, UserError, OSError, KeyboardInterrupt)
        raise OSError(_reason(error)) from error


def load_tensors(tensors: Mapping[str, Tensor], folder: Path, world: Axis | None = None) -> None:
    """Fill tensors, of any layout and dtype, in place from a checkpoint. Collective over the world.

    Raises:
        DamagedCheckpoint: on every rank, if the data a rank reads was changed; some tensors may be filled by then.
        UserError: on every rank, if the checkpoint lacks a name or has another shape.
    """
    with _waiting(world):
        _load(tensors, folder, alone=False, heartbeat=_heartbeat(world))


def stored_names(folder: Path) -> set[str]:
    """Return the names of a checkpoint's tensors; raise DamagedCheckpoint if the index is unreadable."""
    return set(stored_index(folder))


def stored_tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of a checkpoint's tensors by name; raise DamagedCheckpoint if the index is unreadable."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in stored_index(folder).items()}


def load_tensors_alone(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill tensors in place from a checkpoint, outside any process group; see `load_tensors`."""
    _load(tensors, folder, alone=True, heartbeat=Heartbeat())


def _waiting(world: Axis | None) -> AbstractContextManager[None]:
    """Mark torch's exchange of plans and results, in which this rank waits for others unless it writes or reads."""
    return nullcontext() if world is None or world.size == 1 else world.waiting("gather")


def _heartbeat(world: Axis | None) -> Heartbeat:
    return Heartbeat() if world is None else world.heartbeat


def _load(tensors: Mapping[str, Tensor], folder: Path, alone: bool, heartbeat: Heartbeat) -> None:
    try:
        with _quiet():
            dcp.load(detached(tensors), storage_reader=Reader(folder, heartbeat), no_dist=alone)
    except CheckpointException as error:
        _let_through(error, KeyboardInterrupt, DamagedCheckpoint)
        raise UserError(f"The checkpoint {folder} cannot be read ({_reason(error)}).") from error


def detached(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detach tensors from autograd and wrap strided shards, as torch's planners require."""
    found = {name: tensor.detach() for name, tensor in tensors.items()}
    return {name: StridedShard(tensor) if is_strided(tensor) else tensor for name, tensor in found.items()}


def _let_through(error: CheckpointException, *kinds: type[BaseException]) -> None:
    """Re-raise the first failure of the given kinds unwrapped: torch wraps every exception, even Ctrl-C."""
    for cause, _ in error.failures.values():
        if isinstance(cause, kinds):
            raise cause from None


def _reason(error: CheckpointException) -> str:
    """Return the message of the first rank that failed, on one line."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {' '.join(str(cause).split())[:300] or type(cause).__name__}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch, which logs what it also raises and warns when run without a process group."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    finally:
        logger.setLevel(before)

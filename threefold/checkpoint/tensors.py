"""Tensors of a checkpoint in its files, saved and loaded through torch.distributed.checkpoint (DCP).

DCP's planners decide which rank writes and reads which part of which tensor; the storage is ours: raw bytes and an
index, no pickle. The coordinator, rank 0, writes the index. Each part is checked against its checksum when read.
"""

import io
import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self, cast

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from threefold.checkpoint.errors import CHANGED, MODEL, DamagedCheckpoint
from threefold.checkpoint.index import INDEX, ITEM_SIZES, StoredTensor, TensorChunk, index_text, name_of, read_index
from threefold.checksums import ALGORITHM, FileRecord
from threefold.comm.axis import Axis
from threefold.comm.heartbeat import Heartbeat
from threefold.doors import call_hook
from threefold.errors import UserError
from threefold.foreign import FolderFiles
from threefold.host import begin_writing, finish_writing
from threefold.output import write_durably
from threefold.parallel.parameter import offset
from threefold.torch_private.distributed import ChunkedTensor, StridedPlacement

_BLOCK: Final = 4 << 20
"""Bytes hashed and moved at a time, few enough to still be in the processor's cache for the second use."""
_AHEAD: Final = 32 << 20  # bytes after which writeback starts, so that little is left to wait for at the end

ALIGNMENT: Final = 64  # alignment in bytes of tensors that share one block of memory or a mapped file


def save_tensors(tensors: Mapping[str, Tensor], folder: Path, world: Axis) -> None:
    """Write tensors to an empty `folder`, shared by all ranks, durably. Collective over the world.

    A tensor is a `DTensor` if sharded, and the same plain tensor on every rank if replicated. A rank passes only the
    tensors that it holds. A part that several ranks hold, as replicas do, is written by one of them. OSError on every
    rank, if a rank cannot write.
    """
    try:
        with _quiet(world):
            dcp.save(detached(tensors), storage_writer=Writer(folder, world.heartbeat))
    except CheckpointException as error:
        raise OSError(_reason(error)) from error


def save_tensors_alone(tensors: Mapping[str, Tensor], folder: Path, writer: StorageWriter | None = None) -> None:
    """Write tensors to an empty `folder` outside any process group; raise OSError, or the UserError of a `read`."""
    try:
        with _quiet():
            dcp.save(dict(tensors), storage_writer=writer or Writer(folder, Heartbeat()), no_dist=True)
    except CheckpointException as error:
        _let_through(error, UserError, OSError, KeyboardInterrupt)
        raise OSError(_reason(error)) from error


def load_tensors(
    tensors: Mapping[str, Tensor], folder: Path, world: Axis | None = None, *, alone: bool = False
) -> None:
    """Fill tensors, of any layout and dtype, in place from a checkpoint. Collective over the world.

    `world` marks this rank as waiting meanwhile, and provides its heartbeat; `alone` loads outside any process group.

    Raises:
        DamagedCheckpoint: on every rank, if the data a rank reads was changed; some tensors may be filled by then.
        UserError: on every rank, if the checkpoint lacks a name or has another shape.
    """
    heartbeat = Heartbeat() if world is None else world.heartbeat
    try:
        with _quiet(world):
            dcp.load(detached(tensors), storage_reader=Reader(folder, heartbeat), no_dist=alone)
    except CheckpointException as error:
        _let_through(error, KeyboardInterrupt, DamagedCheckpoint)
        raise UserError(f"The checkpoint {folder} cannot be read ({_reason(error)}).") from error


def read_tensor(folder: Path, name: str) -> Tensor:
    """Read a whole tensor of a checkpoint on this process alone; raises like `load_tensors`."""
    shape, dtype = stored_tensors(folder)[name]
    found = torch.empty(shape, dtype=dtype)
    load_tensors({name: found}, folder, alone=True)
    return found


def stored_tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of a checkpoint's tensors by name; raise DamagedCheckpoint if the index is unreadable."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in read_index(folder).items()}


def detached(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detach tensors from autograd, and state the offsets of shards that two mesh axes cut along one dim.

    A weight that tensor parallelism and ZeRO both shard by rows is a `DTensor` with a `_StridedShard`. If its rows do
    not divide evenly, torch 2.13 computes other bounds for it than `fully_shard` used, and parts of the checkpoint
    would be missing or duplicated.
    """
    found = {name: tensor.detach() for name, tensor in tensors.items()}
    for name, tensor in found.items():
        if isinstance(tensor, DTensor) and any(isinstance(each, StridedPlacement) for each in tensor.placements):
            shard = tensor.to_local()
            chunk = ReadableChunk(tuple(offset(tensor)), tuple(shard.shape), shard.detach)
            found[name] = ReadableTensor(tensor.shape, tensor.dtype, [chunk], shard)
    return found


@dataclass(frozen=True)
class ReadableChunk:
    """A box of a tensor: its offsets, its sizes and the function that reads it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]


class ReadableTensor(ChunkedTensor):
    """A tensor made of chunks, in torch.distributed.checkpoint's protocol for sharded tensors."""

    _whole: torch.Size
    _chunks: dict[torch.Size, ReadableChunk]

    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[ReadableChunk], memory: Tensor | None = None
    ) -> Self:
        """Make a tensor from chunks that do not overlap, on the `memory` of a shard or on none."""
        memory = torch.empty(tuple(shape), dtype=dtype, device="meta") if memory is None else memory
        self = memory.as_subclass(cls)
        self._whole, self._chunks = torch.Size(shape), {torch.Size(chunk.offsets): chunk for chunk in chunks}
        return self

    def size(self, dim: int | None = None) -> Any:
        """Return the size of the whole tensor, like a `DTensor`."""
        return self._whole if dim is None else self._whole[dim]

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)) for offsets, chunk in self._chunks.items()]

    def write_items(self, name: str) -> list[WriteItem]:
        properties, items = TensorProperties(dtype=self.dtype), []
        for chunk in self.chunks():
            data = TensorWriteData(chunk=chunk, properties=properties, size=self._whole)
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def chunk_at(self, index: MetadataIndex) -> Tensor:
        return self._chunks[cast(torch.Size, index.offset)].read()


class _Storage:
    """Methods that torch requires of a writer and of a reader of storage, for the folder of a checkpoint."""

    def __init__(self, folder: Path, heartbeat: Heartbeat) -> None:
        self.folder, self.heartbeat = folder, heartbeat

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Writer(_Storage, StorageWriter):
    """Durable writer of a checkpoint's tensors into an empty folder that all ranks share."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"tensors-{rank:05d}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's parts; the results have the chunk, hash and file of each. An OSError contains the name."""
        path = self.folder / plan.storage_data
        items = [item for item in plan.items if 0 not in _box(item).sizes]
        results: list[WriteResult] = []
        if items:
            try:
                with self.heartbeat.working():
                    chunks, hashes, file = self._write_file(path, items, planner)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from error
            results = [
                WriteResult(item.index, chunk.bytes, (chunk, found, file))
                for item, chunk, found in zip(items, chunks, hashes, strict=True)
            ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_file(
        self, path: Path, items: Sequence[WriteItem], planner: SavePlanner
    ) -> tuple[list[TensorChunk], list[int | None], FileRecord]:
        """Write parts one after another, freeing each before reading the next; the hashes are those of weights."""
        chunks: list[TensorChunk] = []
        hashes: list[int | None] = []
        whole, position, begun = xxhash.xxh3_128(), 0, 0
        with path.open("wb") as file:
            for item in items:
                tensor = cast(Tensor, planner.resolve_data(item)).detach().cpu().contiguous()
                hashes.append(_hash(item, tensor) if item.index.fqn.startswith(MODEL) else None)
                content = _bytes_of(tensor)
                part = xxhash.xxh3_128()
                for start in range(0, len(content), _BLOCK):
                    block = content[start : start + _BLOCK]
                    part.update(block)
                    whole.update(block)
                    file.write(block)
                    self.heartbeat.progress()
                    if (end := position + start + len(block)) - begun >= _AHEAD:
                        file.flush()
                        begin_writing(file.fileno(), begun, end - begun)
                        begun = end
                box, checksum = _box(item), f"{ALGORITHM}:{part.hexdigest()}"
                place = (path.name, position, len(content), checksum)
                chunks.append(TensorChunk(tuple(box.offsets), tuple(box.sizes), *place))
                position += len(content)
                del content, tensor
            file.flush()
            for start in range(0, position, _AHEAD):  # in parts, so that the waiting ranks see progress on a slow disk
                finish_writing(file.fileno(), start, min(_AHEAD, position - start))
                self.heartbeat.progress()
            os.fsync(file.fileno())
        return chunks, hashes, FileRecord(position, f"{ALGORITHM}:{whole.hexdigest()}")

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, given what `write_data` returned on every rank; `dcp` calls this on the first rank."""
        chunks: dict[str, list[TensorChunk]] = defaultdict(list)
        files: dict[str, FileRecord] = {}
        hashes: dict[str, int] = defaultdict(int)
        for result in (result for rank in results for result in rank):
            chunk, found, file = result.storage_data
            files[chunk.file] = file
            chunks[result.index.fqn].append(chunk)
            if found is not None:
                hashes[result.index.fqn.removeprefix(MODEL)] += found  # parts add up to the whole
        tensors = {
            name: StoredTensor(tuple(entry.size), name_of(entry.properties.dtype), tuple(chunks[name]))
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        with self.heartbeat.working():
            fingerprint = call_hook("fingerprint_of", hashes) if hashes else None
            write_durably(self.folder / INDEX, index_text(tensors, files, fingerprint))


class Reader(_Storage, StorageReader):
    """Reader of a checkpoint, which checks each part against its checksum and reads it once."""

    def __init__(self, folder: Path, heartbeat: Heartbeat) -> None:
        super().__init__(folder, heartbeat)
        self._tensors: dict[str, StoredTensor] = {}
        self._damage: DamagedCheckpoint | None = None

    def read_metadata(self, *args: Any) -> Metadata:
        """Return the index as torch's metadata; damage is raised one step later, where torch does not wrap errors."""
        try:
            self._tensors = read_index(self.folder)
        except DamagedCheckpoint as damage:
            self._damage = damage
        entries: dict[str, Any] = {}
        for name, tensor in self._tensors.items():
            boxes = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in tensor.chunks]
            properties = TensorProperties(dtype=tensor.dtype)
            entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), boxes)
        return Metadata(entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._damage is not None:
            raise self._damage

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of this rank's plan; raise DamagedCheckpoint if a file is missing or was changed."""
        chunks = {(name, chunk.offsets): chunk for name, each in self._tensors.items() for chunk in each.chunks}
        files: dict[str, dict[TensorChunk, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            chunk = chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            files[chunk.file][chunk].append(item)
        stored = FolderFiles(self.folder)
        for name, requests in files.items():
            try:
                with self.heartbeat.working(), stored.opened(name) as file:
                    for chunk in sorted(requests, key=lambda each: each.position):
                        self._read(file, chunk, requests[chunk], planner)
            except OSError as error:
                raise DamagedCheckpoint(self.folder, f"its {name} cannot be read ({error.strerror})") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: io.RawIOBase, chunk: TensorChunk, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        progress = self.heartbeat.progress
        progress()
        tensor = self._tensors[items[0].storage_index.fqn]
        targets = [planner.resolve_tensor(item).detach() for item in items]
        into = targets[0]
        if (
            len(targets) == 1
            and type(into) is Tensor
            and into.device.type == "cpu"
            and into.dtype == tensor.dtype
            and tuple(into.shape) == chunk.sizes
            and into.is_contiguous()
        ):
            _fill(file, self.folder, chunk, into, progress)
        else:
            held = read_chunk(file, self.folder, tensor, chunk, progress)
            for item, target in zip(items, targets, strict=True):
                bounds = zip(item.storage_offsets, item.lengths, strict=True)
                target.copy_(held[tuple(slice(first, first + length) for first, length in bounds)])
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)


def read_chunk(
    file: io.RawIOBase,
    folder: Path,
    tensor: StoredTensor,
    chunk: TensorChunk,
    progress: Callable[[], None] = lambda: None,
) -> Tensor:
    """Read a chunk of `tensor` from an open file of `folder` into new memory; DamagedCheckpoint if it was changed."""
    held = torch.empty(chunk.sizes, dtype=tensor.dtype)
    _fill(file, folder, chunk, held, progress)
    return held


def _fill(file: io.RawIOBase, folder: Path, chunk: TensorChunk, target: Tensor, progress: Callable[[], None]) -> None:
    file.seek(chunk.position)
    into, digest, done = _bytes_of(target), xxhash.xxh3_128(), 0
    while size := file.readinto(into[done : done + _BLOCK]):
        digest.update(into[done : done + size])
        done += size
        progress()
    if done < chunk.bytes or f"{ALGORITHM}:{digest.hexdigest()}" != chunk.checksum:
        raise DamagedCheckpoint(folder, f"its {chunk.file} {CHANGED}, from byte {chunk.position} on")


def _hash(item: WriteItem, tensor: Tensor) -> int | None:
    """Return the hash of a part of a weight; those of all parts add up to that of the weight. None without a room."""
    box, whole = _box(item), cast(TensorWriteData, item.tensor_data).size
    found: int | None = call_hook("hash_of_part", tensor, box.sizes, box.offsets, whole)
    return found


def _box(item: WriteItem) -> ChunkStorageMetadata:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is not a tensor, and a checkpoint holds nothing else")
    if name_of(item.tensor_data.properties.dtype) not in ITEM_SIZES:
        raise TypeError(f"{item.index.fqn} is of {item.tensor_data.properties.dtype}, which has no name in {INDEX}")
    return item.tensor_data.chunk


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))


def _let_through(error: CheckpointException, *kinds: type[BaseException]) -> None:
    """Re-raise the first failure of the given kinds unwrapped: torch wraps every exception, even Ctrl-C."""
    for cause, _ in error.failures.values():
        if isinstance(cause, kinds):
            raise cause from None


def _reason(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {' '.join(str(cause).split())[:300] or type(cause).__name__}"


@contextmanager
def _quiet(world: Axis | None = None) -> Iterator[None]:
    """Silence torch, which logs errors that it also raises, and mark this rank as waiting for the others."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    waiting = nullcontext() if world is None or world.size == 1 else world.waiting("gather")
    try:
        with waiting, torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # without a process group
            yield
    finally:
        logger.setLevel(before)

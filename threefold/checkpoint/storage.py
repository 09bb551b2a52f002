"""Tensor files: a StorageWriter and StorageReader for torch.distributed.checkpoint (raw bytes and an index, no pickle).

DCP's planners decide which rank writes and reads which part of which tensor. Each rank writes one file
(tensors-00000.bin for the first), the concatenated bytes of its parts; the coordinator writes the index. Every part is
checked against its checksum as it is read. `Shards` writes safetensors files.
"""

import io
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, Any, Final, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.index import DTYPES, INDEX, DataFile, StoredTensor, TensorChunk, index_text, read_index
from threefold.checkpoint.version1 import METADATA, read_version1_chunk, read_version1_index
from threefold.checksums import ALGORITHM
from threefold.comm.heartbeat import Heartbeat
from threefold.host import begin_writing, finish_writing

_BLOCK: Final = 4 << 20
"""Bytes hashed and moved at a time, few enough to still be in the processor's cache for the second use."""
_AHEAD: Final = 32 << 20
"""Bytes after which writeback starts; left to the end, all of it would have to be waited for."""


def stored_index(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint of either version by name; raise DamagedCheckpoint if its index is damaged."""
    is_version1 = (folder / METADATA).exists() and not (folder / INDEX).exists()
    return read_version1_index(folder) if is_version1 else read_index(folder)


@dataclass(frozen=True)
class _Written:
    """Message from a rank to the coordinator about a part that it wrote."""

    chunk: TensorChunk
    file: DataFile


class Writer(StorageWriter):
    """Durable writer of a checkpoint's tensors into an empty folder that all ranks share."""

    def __init__(self, folder: Path, heartbeat: Heartbeat) -> None:
        self.folder, self.heartbeat = folder, heartbeat

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=f"tensors-{rank:05d}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's parts; an OSError contains the file's name."""
        path = self.folder / plan.storage_data
        items = [item for item in plan.items if 0 not in _box(item).sizes]
        done: Future[list[WriteResult]] = Future()
        if not items:
            done.set_result([])
            return done
        try:
            with self.heartbeat.working():
                chunks, file = _write_file(path, items, planner, self.heartbeat)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        results = zip(items, chunks, strict=True)
        done.set_result([WriteResult(item.index, chunk.bytes, _Written(chunk, file)) for item, chunk in results])
        return done

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of the tensors that all ranks wrote."""
        chunks: dict[str, list[TensorChunk]] = defaultdict(list)
        files: dict[str, DataFile] = {}
        for result in (result for rank in results for result in rank):
            written: _Written = result.storage_data
            chunks[result.index.fqn].append(written.chunk)
            files[written.chunk.file] = written.file
        tensors = {
            name: StoredTensor(tuple(entry.size), entry.properties.dtype, tuple(chunks[name]))
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, dcp.TensorStorageMetadata)
        }
        with self.heartbeat.working(), (self.folder / INDEX).open("w", encoding="utf-8") as file:
            file.write(index_text(tensors, files))
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(StorageReader):
    """Reader of a checkpoint of either version, which checks each part against its checksum and reads it once."""

    def __init__(self, folder: Path, heartbeat: Heartbeat) -> None:
        self.folder, self.heartbeat = folder, heartbeat
        self._tensors: dict[str, StoredTensor] = {}
        self._damage: DamagedCheckpoint | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any) -> dcp.Metadata:
        """Return the index as torch's metadata; damage is raised one step later, where torch does not wrap errors."""
        try:
            self._tensors = stored_index(self.folder)
        except DamagedCheckpoint as damage:
            self._damage = damage
        entries = {name: _described(tensor) for name, tensor in self._tensors.items()}
        return dcp.Metadata(entries)  # type: ignore[arg-type]

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._damage is not None:
            raise self._damage

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of this rank's plan; raise DamagedCheckpoint if a file is missing or was changed."""
        chunks = {(name, chunk.offsets): chunk for name, each in self._tensors.items() for chunk in each.chunks}
        files: dict[str, dict[TensorChunk, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            index = item.storage_index
            chunk = chunks[index.fqn, tuple(index.offset or ())]
            files[chunk.file][chunk].append(item)
        for name, requests in files.items():
            try:
                with self.heartbeat.working(), (self.folder / name).open("rb", buffering=0) as file:
                    for chunk in sorted(requests, key=lambda each: each.position):
                        self._read(file, chunk, requests[chunk], planner)
            except OSError as error:
                raise DamagedCheckpoint(self.folder, f"its {name} cannot be read ({error.strerror})") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, file: io.RawIOBase, chunk: TensorChunk, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        self.heartbeat.progress()
        tensor = self._tensors[items[0].storage_index.fqn]
        targets = [planner.resolve_tensor(item).detach() for item in items]
        if chunk.checksum is not None and len(targets) == 1 and _is_place_for(targets[0], tensor, chunk):
            _fill(file, self.folder, chunk, _bytes_of(targets[0]), self.heartbeat.progress)
        else:
            held = read_chunk(file, self.folder, tensor, chunk, self.heartbeat.progress)
            for item, target in zip(items, targets, strict=True):
                target.copy_(_part(held, item.storage_offsets, item.lengths))
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def read_chunk(
    file: io.RawIOBase,
    folder: Path,
    tensor: StoredTensor,
    chunk: TensorChunk,
    progress: Callable[[], None] = lambda: None,
) -> Tensor:
    """Read a chunk of `tensor` from an open file of either version into new memory, and check it against its checksum.

    Args:
        folder: folder of the checkpoint, for messages.
        progress: called for each block read.

    Raises:
        DamagedCheckpoint: the chunk was changed.
    """
    if chunk.checksum is None:
        return read_version1_chunk(file, folder, tensor, chunk)
    held = torch.empty(chunk.sizes, dtype=tensor.dtype)
    _fill(file, folder, chunk, _bytes_of(held), progress)
    return held


def _fill(file: io.RawIOBase, folder: Path, chunk: TensorChunk, into: memoryview, progress: Callable[[], None]) -> None:
    file.seek(chunk.position)
    digest, done = xxhash.xxh3_128(), 0
    while size := file.readinto(into[done : done + _BLOCK]):
        digest.update(into[done : done + size])
        done += size
        progress()
    if done < chunk.bytes or f"{ALGORITHM}:{digest.hexdigest()}" != chunk.checksum:
        raise DamagedCheckpoint(
            folder,
            f"its {chunk.file} does not have the checksum that it was written with, from byte {chunk.position} on",
        )


def _write_file(
    path: Path, items: Sequence[WriteItem], planner: SavePlanner, heartbeat: Heartbeat
) -> tuple[list[TensorChunk], DataFile]:
    """Write parts one after another, freeing each before reading the next."""
    chunks: list[TensorChunk] = []
    whole, position, begun = xxhash.xxh3_128(), 0, 0
    with path.open("wb") as file:
        for item in items:
            content = _bytes_of(cast(Tensor, planner.resolve_data(item)).detach().cpu().contiguous())
            part = xxhash.xxh3_128()
            for start in range(0, len(content), _BLOCK):
                block = content[start : start + _BLOCK]
                part.update(block)
                whole.update(block)
                file.write(block)
                heartbeat.progress()
                if (end := position + start + len(block)) - begun >= _AHEAD:
                    file.flush()
                    begin_writing(file.fileno(), begun, end - begun)
                    begun = end
            box, checksum = _box(item), f"{ALGORITHM}:{part.hexdigest()}"
            chunks.append(
                TensorChunk(tuple(box.offsets), tuple(box.sizes), path.name, position, len(content), checksum)
            )
            position += len(content)
            del content
        file.flush()
        for start in range(0, position, _AHEAD):  # in parts, so that the waiting ranks see progress on a slow disk
            finish_writing(file.fileno(), start, min(_AHEAD, position - start))
            heartbeat.progress()
        os.fsync(file.fileno())
    return chunks, DataFile(position, f"{ALGORITHM}:{whole.hexdigest()}")


def _box(item: WriteItem) -> dcp.ChunkStorageMetadata:
    """Return the box of the tensor that an item writes."""
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is no tensor, and a checkpoint holds nothing else")
    if str(item.tensor_data.properties.dtype).removeprefix("torch.") not in DTYPES:
        raise TypeError(f"{item.index.fqn} is of {item.tensor_data.properties.dtype}, which has no name in {INDEX}")
    return item.tensor_data.chunk


def _described(tensor: StoredTensor) -> dcp.TensorStorageMetadata:
    chunks = [dcp.ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in tensor.chunks]
    return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)


def _is_place_for(target: Tensor, tensor: StoredTensor, chunk: TensorChunk) -> bool:
    """Return whether a chunk may be read straight into the memory of the target tensor."""
    return (
        type(target) is Tensor
        and target.device.type == "cpu"
        and target.dtype == tensor.dtype
        and tuple(target.shape) == chunk.sizes
        and target.is_contiguous()
    )


def _part(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    return tensor[tuple(slice(first, first + length) for first, length in zip(offsets, lengths, strict=True))]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


CODES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Names of the dtypes in a safetensors header."""
_ALIGNMENT: Final = 8


@dataclass(frozen=True)
class Planned:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Shards:
    """Safetensors files of at most `limit` bytes each (but at least one tensor), with an index if there are several.

    Args:
        tensors: tensors to write, in the order of the files.
        stem: prefix of the file names.

    Attributes:
        names: names of the files.
    """

    def __init__(self, folder: Path, tensors: Sequence[Planned], limit: int, stem: str = "model") -> None:
        self._open = ExitStack()
        self._places: dict[str, tuple[IO[bytes], int, Planned]] = {}
        shares = _shares(tensors, limit)
        self.names = [_name(stem, number, len(shares)) for number in range(len(shares))]
        for name, share in zip(self.names, shares, strict=True):
            self._begin(folder / name, share)
        if len(shares) > 1:
            _write_index(folder / f"{stem}.safetensors.index.json", dict(zip(self.names, shares, strict=True)))

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors at their positions, rounded to the planned dtypes."""
        for name, tensor in tensors.items():
            file, place, planned = self._places.pop(name)
            if tuple(tensor.shape) != planned.shape:
                raise ValueError(f"{name} was planned as {planned.shape} and is {tuple(tensor.shape)}")
            file.seek(place)
            flat = tensor.to(planned.dtype).contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Check that all planned tensors were written."""
        if self._places:
            raise ValueError(f"{len(self._places)} tensors were planned and did not come, such as {min(self._places)}")

    def _begin(self, path: Path, share: Sequence[Planned]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for planned in share:
            end = start + planned.bytes
            header[planned.name] = {
                "dtype": CODES[planned.dtype],
                "shape": list(planned.shape),
                "data_offsets": [start, end],
            }
            start = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        file = self._open.enter_context(path.open("wb"))
        file.write(len(text).to_bytes(8, "little") + text)
        begin = file.tell()
        file.truncate(begin + start)
        for planned in share:
            self._places[planned.name] = (file, begin, planned)
            begin += planned.bytes


def _shares(tensors: Sequence[Planned], limit: int) -> list[list[Planned]]:
    shares: list[list[Planned]] = [[]]
    filled = 0
    for planned in tensors:
        if shares[-1] and filled + planned.bytes > limit:
            shares.append([])
            filled = 0
        shares[-1].append(planned)
        filled += planned.bytes
    return shares


def _name(stem: str, number: int, count: int) -> str:
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_index(path: Path, files: Mapping[str, Sequence[Planned]]) -> None:
    total = sum(planned.bytes for share in files.values() for planned in share)
    weights = {planned.name: name for name, share in files.items() for planned in share}
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

"""Files of `torch.save` and folders of torch.distributed.checkpoint, read without unpickling (`pickled`)."""

import io
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from threefold.convert.pickled import LARGEST, Call, Name, NotData, Reference, read
from threefold.errors import UserError
from threefold.files import shown
from threefold.foreign import FolderFiles

METADATA: Final = ".metadata"
_STORAGES: Final = (
    {"FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16}
    | {"BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32}
    | {"ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8}
    | {"BoolStorage": torch.bool}
)
_DTYPES: Final = {str(dtype): dtype for dtype in _STORAGES.values()}
_REBUILT: Final = "torch._utils._rebuild_tensor_v2"


@dataclass(frozen=True)
class PickledTensor:
    """Tensor of a file of `torch.save`: where its storage is, and its place there."""

    storage: str  # name of the entry in the archive
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int  # element of the storage


class TorchFile:
    """A file of `torch.save`, or the `length` bytes of one within a larger file: `value`, with tensors to `read`."""

    def __init__(self, folder: Path, name: str, start: int = 0, length: int | None = None) -> None:
        self.path = folder / name
        try:
            self._file: Any = FolderFiles(folder).opened(name)
            if length is not None:
                with self._file as whole:
                    whole.seek(start)
                    self._file = io.BytesIO(whole.read(min(length, os.fstat(whole.fileno()).st_size)))
            entries = {entry.filename: entry for entry in zipfile.ZipFile(self._file).infolist()}
            size = self._file.seek(0, os.SEEK_END)
            pickle = next((entry for name, entry in entries.items() if name.endswith("data.pkl")), None)
            odd = (entry.compress_type or entry.flag_bits & 1 or entry.file_size > size for entry in entries.values())
            if pickle is None or any(odd):
                raise NotData("it was not written by torch.save")
            if pickle.file_size > LARGEST:
                raise NotData(f"it has a pickle of {pickle.file_size:,} bytes and {LARGEST:,} are allowed")
            self._root, self._entries = pickle.filename.removesuffix("data.pkl"), entries
            order = entries.get(f"{self._root}byteorder")
            if order is not None and self._content(order, 0, 6) != b"little":
                raise NotData("its numbers are big-endian")
            self.value = read(self._content(pickle, 0, pickle.file_size))
        except OSError as error:
            raise UserError(f"Cannot read {shown(self.path)}: {error.strerror}.") from None
        except NotData as problem:
            raise self.problem(str(problem)) from None
        except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OverflowError, MemoryError):
            raise self.problem("it is no archive of torch.save, or only a part of one") from None

    def problem(self, what: str) -> UserError:
        return UserError(f"{shown(self.path)} cannot be read: {what}; fetch or save it again.")

    def tensor(self, value: Any) -> PickledTensor | None:
        """Return the tensor that a value of the pickle stands for; None if it is something else."""
        if isinstance(value, Call) and value.name == "torch._utils._rebuild_parameter" and value.args:
            value = value.args[0]
        if not isinstance(value, Call) or value.name != _REBUILT:
            return None
        try:
            reference, first, shape, stride = value.args[:4]
            if not isinstance(reference, Reference):
                raise ValueError
            kind, storage, key, *_ = reference.key
            dtype = _STORAGES[storage.name.rpartition(".")[2]] if isinstance(storage, Name) else None
            shape, stride = whole_numbers(shape), whole_numbers(stride)
            if kind != "storage" or dtype is None or len(stride) != len(shape) or type(first) is not int or first < 0:
                raise ValueError
        except (ValueError, TypeError, KeyError):
            raise self.problem("it has a tensor of a kind that Threefold does not know") from None
        return PickledTensor(f"{self._root}data/{key}", dtype, shape, stride, first)

    def read(self, tensor: PickledTensor) -> Tensor:
        """Read a tensor, in memory of its own; UserError if its data are not there."""
        if not prod(tensor.shape):
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        count = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride, strict=True)) + 1
        entry, size = self._entries.get(tensor.storage), tensor.dtype.itemsize
        if entry is None or (tensor.first + count) * size > entry.file_size or prod(tensor.shape) > count:
            raise self.problem("the data of a tensor are missing")
        try:
            data = self._content(entry, tensor.first * size, count * size)
        except OSError as error:
            raise UserError(f"Cannot read {shown(self.path)}: {error.strerror}.") from None
        except NotData as problem:
            raise self.problem(str(problem)) from None
        return torch.frombuffer(data, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride).contiguous()

    def _content(self, entry: zipfile.ZipInfo, first: int, count: int) -> bytearray:
        """Read bytes of an entry, whose checksum some writers leave out."""
        self._file.seek(entry.header_offset)
        header = self._file.read(30)
        begin = entry.header_offset + 30 + int.from_bytes(header[26:28], "little")
        self._file.seek(begin + int.from_bytes(header[28:30], "little") + first)
        data = bytearray(min(count, entry.file_size))
        view = memoryview(data)
        while view and (read := self._file.readinto(view)):
            view = view[read:]
        if view or len(data) < count:
            raise NotData("the data of a tensor are missing")
        return data


def whole_numbers(value: Any) -> tuple[int, ...]:
    """Return a tuple of sizes, which may be a call of `torch.Size`; ValueError for anything else."""
    if isinstance(value, Call) and value.name == "torch.Size":
        value = value.args[0] if value.args else ()
    if not isinstance(value, tuple | list) or not all(type(each) is int and 0 <= each < 1 << 48 for each in value):
        raise ValueError
    return tuple(value)


@dataclass(frozen=True)
class TensorPart:
    """Part of a tensor in a folder: its place, and the bytes of a file of `torch.save` that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class DividedTensor:
    """Tensor of a folder, in parts that cover it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]


class DistributedFolder:
    """Tensors of a folder of torch.distributed.checkpoint, by name; other objects in it are passed over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            with FolderFiles(folder).opened(METADATA) as file:
                metadata = read(file.read(min(LARGEST + 1, os.fstat(file.fileno()).st_size)))
            attributes = metadata.attributes
            described, places = attributes["state_dict_metadata"], self._places(attributes["storage_data"])
            self.tensors: Mapping[str, DividedTensor] = {
                name: self._divided(name, value.attributes, places)
                for name, value in described.items()
                if value.name.endswith(".TensorStorageMetadata")
            }
        except OSError as error:
            raise UserError(f"Cannot read {shown(folder / METADATA)}: {error.strerror}.") from None
        except NotData as problem:
            raise UserError(
                f"{shown(folder / METADATA)} cannot be read: {problem}; fetch or save the checkpoint again."
            ) from None
        except (AttributeError, KeyError, TypeError, ValueError, IndexError):
            raise UserError(
                f"{shown(folder / METADATA)} is not that of torch.distributed.checkpoint; fetch or save the checkpoint "
                "again."
            ) from None

    def _places(self, storage: Mapping[Call, Call]) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
        found = {}
        for index, info in storage.items():
            key, place = index.attributes, info.attributes
            if place.get("transform_descriptors"):
                raise NotData("its tensors are compressed")
            start, length = whole_numbers([place["offset"], place["length"]])
            offset = () if key.get("offset") is None else whole_numbers(key["offset"])
            found[key["fqn"], offset] = (str(place["relative_path"]), start, length)
        return found

    def _divided(self, name: str, value: dict[str, Any], places: Mapping[Any, tuple[str, int, int]]) -> DividedTensor:
        state = value["properties"].state
        dtype = state[0] if isinstance(state, tuple) else value["properties"].attributes["dtype"]
        shape, parts, covered = whole_numbers(value["size"]), [], 0
        for chunk in value["chunks"]:
            offsets, sizes = (whole_numbers(chunk.attributes[each]) for each in ("offsets", "sizes"))
            bounds = zip(offsets, sizes, shape, strict=True)
            if any(first + size > whole for first, size, whole in bounds):
                raise ValueError
            covered += prod(sizes)
            parts.append(TensorPart(offsets, sizes, *places[name, offsets]))
        if covered != prod(shape) or len({part.offsets for part in parts}) < len(parts):
            raise NotData(f"the parts of {shown(name)} do not make a whole")
        return DividedTensor(_DTYPES[dtype.name], shape, tuple(parts))

    def _held(self, part: TensorPart) -> int:
        """Return the bytes of a part; UserError if its file does not hold them."""
        try:
            size = FolderFiles(self.folder).size(part.file)
        except OSError as error:
            raise UserError(f"Cannot read {shown(self.folder / part.file)}: {error.strerror}.") from None
        if size < part.start + part.length:
            raise UserError(
                f"{shown(self.folder / part.file)} has {size:,} bytes and {METADATA} says more; fetch or save it again."
            )
        return part.length

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Read a whole tensor, or the one at `index` of its first dim; UserError if a part of it cannot be read."""
        described = self.tensors[name]
        kept = described.parts
        if index is not None:
            kept = tuple(part for part in kept if part.offsets[0] <= index < part.offsets[0] + part.sizes[0])
        shape = described.shape if index is None else described.shape[1:]
        if prod(shape) * described.dtype.itemsize > sum(map(self._held, kept)):
            raise UserError(f"{shown(self.folder)} lacks a part of {shown(name)}; fetch or save it again.")
        whole = torch.zeros(shape, dtype=described.dtype)
        for part in kept:
            file = TorchFile(self.folder, part.file, part.start, part.length)
            stored = file.tensor(file.value)
            if stored is None or (stored.shape, stored.dtype) != (part.sizes, described.dtype):
                raise file.problem(f"it does not hold the part of {shown(name)} that {METADATA} says")
            tensor, bounds = file.read(stored), [*zip(part.offsets, part.sizes, strict=True)]
            if index is not None:
                tensor, bounds = tensor[index - part.offsets[0]], bounds[1:]
            whole[tuple(slice(first, first + size) for first, size in bounds)] = tensor
        return whole

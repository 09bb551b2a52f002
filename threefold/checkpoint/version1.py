"""Reader of version 1 checkpoints, written by `torch.distributed.checkpoint`: `.metadata`, a pickle, and `*.distcp`.

A pickle is a program that names the functions it calls. Here it may name only a few, each replaced by an inert record;
nothing else is looked up or called. The payload of a `.distcp` file is read with torch's `weights_only` after comparing
the checksums that torch wrote.
"""

import io
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from threefold.checkpoint.errors import DamagedCheckpoint, is_plain_name, whole
from threefold.checkpoint.index import DTYPES, StoredTensor, TensorChunk, check_index
from threefold.errors import UserError
from threefold.files import read_bytes, shown

METADATA: Final = ".metadata"

_TORCH: Final = "torch.distributed.checkpoint."
_RECORDS: Final = frozenset(
    (
        (_TORCH + "metadata", "Metadata"),
        (_TORCH + "metadata", "TensorStorageMetadata"),
        (_TORCH + "metadata", "TensorProperties"),
        (_TORCH + "metadata", "ChunkStorageMetadata"),
        (_TORCH + "metadata", "MetadataIndex"),
        (_TORCH + "metadata", "StorageMeta"),
        (_TORCH + "metadata", "_MEM_FORMAT_ENCODING"),
        (_TORCH + "filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    )
)
"""Module and name of each global that becomes a `_Record`."""


def read_version1_index(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name.

    Raises:
        DamagedCheckpoint: `.metadata` is missing, damaged, or names something that no checkpoint needs.
    """
    try:
        content = read_bytes(folder / METADATA)
    except UserError as error:
        raise DamagedCheckpoint(folder, str(error).removesuffix(".")) from None
    try:
        state = _Unpickler(io.BytesIO(content)).load().state
        tensors = _tensors(state["state_dict_metadata"], state["storage_data"])
    except _Refused as error:
        raise DamagedCheckpoint(
            folder, f"its {METADATA} refers to {error}, which no checkpoint needs and which was not looked up"
        ) from None
    except Exception:  # a damaged pickle raises whatever its opcodes run into
        raise DamagedCheckpoint(folder, f"its {METADATA} is damaged") from None
    check_index(folder, tensors)
    return tensors


def read_version1_chunk(file: io.RawIOBase, folder: Path, tensor: StoredTensor, chunk: TensorChunk) -> Tensor:
    """Read a chunk from an open `.distcp` file; raise DamagedCheckpoint if the file contains something else."""
    file.seek(chunk.position)
    held = io.BytesIO(file.read(chunk.bytes) or b"")
    try:
        with zipfile.ZipFile(held) as archive:
            damaged = archive.testzip()
        held.seek(0)
        found = None if damaged else torch.load(held, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, zipfile.BadZipFile, zlib.error, OSError, EOFError, LookupError):
        found = None
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, MemoryError, AssertionError):
        found = None
    if type(found) is not Tensor or tuple(found.shape) != chunk.sizes or found.dtype != tensor.dtype:
        raise DamagedCheckpoint(folder, f"a part of its {chunk.file} is damaged or no tensor")
    return found


class _Refused(Exception):
    """Reference of a pickle to a function or class that is not allowed; the message is its name."""


class _Record:
    """Inert replacement of a pickled object or call, with its arguments as state."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):  # pure Python: the C one allocates memory by a damaged length
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return type(name, (_Record,), {})  # a new class each time, so the pickle cannot alter a shared one
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise _Refused(shown(f"{module}.{name}"))


def _tensors(described: dict[str, _Record], stored: dict[_Record, _Record]) -> dict[str, StoredTensor]:
    places = {(index.state["fqn"], tuple(index.state["offset"])): info.state for index, info in stored.items()}
    tensors = {}
    for name, record in described.items():
        properties, size, chunks = (record.state[key] for key in ("properties", "size", "chunks"))
        boxes = [(_sizes(chunk.state["offsets"]), _sizes(chunk.state["sizes"])) for chunk in chunks]
        held = tuple(_chunk(*box, places[name, box[0]]) for box in boxes if 0 not in box[1])
        if not isinstance(name, str) or not isinstance(properties.state[0], torch.dtype):
            raise ValueError("no tensor")
        tensors[name] = StoredTensor(_sizes(size), properties.state[0], held)
    return tensors


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], place: dict[str, Any]) -> TensorChunk:
    if not is_plain_name(place["relative_path"]) or place.get("transform_descriptors"):
        raise ValueError("no file of the folder")
    return TensorChunk(offsets, sizes, place["relative_path"], whole(place["offset"]), whole(place["length"]), None)


def _sizes(value: Any) -> tuple[int, ...]:
    return tuple(whole(each) for each in value)

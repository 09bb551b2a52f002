"""Files of a record: JSON that carries its own checksum, and tensors in the safetensors format.

Records may come from anybody. What is read is checked, and nothing is unpickled.
"""

import json
import os
import stat
import struct
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

_LARGEST_TEXT: Final = 256 << 20
"""Largest size, in bytes, of a JSON text."""
_DEEPEST: Final = 100
"""Levels of lists and objects in JSON: what reads the values goes down one call, or several, for each."""
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


def read_bytes(path: Path, size: int = _LARGEST_TEXT, offset: int = 0) -> bytes:
    """Return `size` bytes of a regular file, or all if it has fewer; OSError for anything else, which is not opened."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{path} is no regular file")
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def load_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; raise ValueError if it is none, or nested too deeply."""
    try:
        level = [value := json.loads(text)]
    except RecursionError:
        raise ValueError("nested too deeply") from None
    for _ in range(_DEEPEST):
        level = [each for one in level for each in (one.values() if isinstance(one, dict) else one)] if level else []
        level = [each for each in level if isinstance(each, dict | list)]
    if level:
        raise ValueError("nested too deeply")
    return value


def checksum(path: Path) -> str:
    """Return the checksum of a file's content."""
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(8 << 20):
            digest.update(block)
    return f"blake2b:{digest.hexdigest()}"


def seal(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a JSON object with their checksum, which is independent of their order, appended."""
    text = json.dumps(facts, sort_keys=True).encode()
    return {**facts, "checksum": f"blake2b:{blake2b(text, digest_size=16).hexdigest()}"}


def unseal(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the members without their checksum, or None if it is missing or wrong."""
    members = {name: value for name, value in facts.items() if name != "checksum"}
    return members if seal(members) == facts else None


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Write tensors and facts in the safetensors format."""
    header: dict[str, Any] = {"__metadata__": dict(facts)}
    flat = {name: tensor.detach().cpu().reshape(-1).contiguous() for name, tensor in tensors.items()}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in flat.values():
            file.write(values.view(torch.uint8).numpy().data)


class TensorFile:
    """A file that `save_tensors` wrote; ValueError, OSError, LookupError or TypeError if it is damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        (size,) = struct.unpack("<Q", read_bytes(path, 8).ljust(8, b"\0"))
        if size > _LARGEST_TEXT:
            raise ValueError(size)
        self._index, self._start = load_json(read_bytes(path, size, 8)), 8 + size
        self.facts: dict[str, str] = self._index["__metadata__"]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the file."""
        dtype, shape = _DTYPES[self._index[name]["dtype"]], self._index[name]["shape"]
        start, end = self._index[name]["data_offsets"]
        if not 0 <= start <= end:
            raise ValueError(name)
        content = np.frombuffer(bytearray(read_bytes(self._path, end - start, self._start + start)), np.uint8)
        return torch.from_numpy(content).view(dtype).view(shape)

"""Writing safetensors whose tensors come one after the other.

The library writes a file from tensors that are all in memory; here the header is written first, and each tensor at its
position when it is ready. https://github.com/huggingface/safetensors#format specifies the format.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Final

import torch
from torch import Tensor

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
"""Names of the dtypes in a header."""
_ALIGNMENT: Final = 8


@dataclass(frozen=True)
class Planned:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Shards:
    """Files of at most `limit` bytes of tensors each, but at least one tensor, and the index where they are several.

    Args:
        folder: to write to.
        tensors: to be written, in the order of the files.
        limit: bytes.
        stem: what the names of the files begin with.

    Attributes:
        names: of the files.
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
        """Write tensors at their positions, rounded to the dtype planned."""
        for name, tensor in tensors.items():
            file, place, planned = self._places.pop(name)
            if tuple(tensor.shape) != planned.shape:
                raise ValueError(f"{name} was planned as {planned.shape} and is {tuple(tensor.shape)}")
            file.seek(place)
            flat = tensor.to(planned.dtype).contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Check that all were written."""
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

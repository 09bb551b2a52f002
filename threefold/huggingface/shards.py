"""Safetensors files of a limited size, written tensor by tensor."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Final

import torch
from torch import Tensor

from threefold.checkpoint.index import StoredTensor

CODES: Final = (
    {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"}
    | {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
    | {torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
)
"""Names of the dtypes in a safetensors header."""


class Shards:
    """Safetensors files of at most `limit` bytes each (but at least one tensor), with an index if there are several."""

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor], limit: int, stem: str = "model") -> None:
        self._open = ExitStack()
        self._places: dict[str, tuple[IO[bytes], int, StoredTensor]] = {}
        groups = list(in_groups(tensors, limit))
        count = len(groups)
        self.names = [f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
        if count == 1:
            self.names = [f"{stem}.safetensors"]
        else:
            total = sum(tensor.bytes for tensor in tensors.values())
            weights = {each: name for name, group in zip(self.names, groups, strict=True) for each in group}
            index = {"metadata": {"total_size": total}, "weight_map": weights}
            path = folder / f"{stem}.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for name, group in zip(self.names, groups, strict=True):
            header: dict[str, object] = {"__metadata__": {"format": "pt"}}
            starts, end = {}, 0
            for each, planned in group.items():
                starts[each], end = end, end + planned.bytes
                offsets = [starts[each], end]
                header[each] = {"dtype": CODES[planned.dtype], "shape": planned.shape, "data_offsets": offsets}
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            file = self._open.enter_context((folder / name).open("wb"))
            file.write(len(text).to_bytes(8, "little") + text)
            begin = file.tell()
            file.truncate(begin + end)
            for each, planned in group.items():
                self._places[each] = (file, begin + starts[each], planned)

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._open.close()
        if self._places and kind is None:
            raise ValueError(f"{len(self._places)} tensors were planned and did not come, such as {min(self._places)}")

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors at their positions, rounded to the planned dtypes."""
        for name, tensor in tensors.items():
            file, place, planned = self._places.pop(name)
            if tuple(tensor.shape) != planned.shape:
                raise ValueError(f"{name} was planned as {planned.shape} and is {tuple(tensor.shape)}")
            file.seek(place)
            flat = tensor.to(planned.dtype).contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)


def in_groups(tensors: Mapping[str, StoredTensor], limit: int) -> Iterator[dict[str, StoredTensor]]:
    """Divide tensors into groups of at most `limit` bytes, or of one larger tensor; yield at least one group."""
    group: dict[str, StoredTensor] = {}
    filled = 0
    for name, tensor in tensors.items():
        if group and filled + tensor.bytes > limit:
            yield group
            group, filled = {}, 0
        group[name] = tensor
        filled += tensor.bytes
    yield group

"""Writers of safetensors, torch and DCP files from tensors that are read one at a time or piece by piece."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from threefold.checkpoint.errors import MODEL, OPTIMIZER, DamagedCheckpoint
from threefold.checkpoint.index import StoredTensor, TensorChunk
from threefold.checkpoint.storage import CODES, Planned, Shards, read_chunk
from threefold.checkpoint.tensors import save_tensors_alone
from threefold.errors import UserError
from threefold.files import shown
from threefold.output import Progress
from threefold.torch_private.distributed import PiecewiseTensor


@dataclass(frozen=True)
class TensorPiece:
    """A box of a tensor: its offsets, its sizes and the function that reads it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Tensor]


class StreamedTensor(PiecewiseTensor):
    """A tensor without storage that implements torch.distributed.checkpoint's protocol for sharded tensors.

    Each piece is stored as its own chunk, so loading a shard reads only the pieces that it overlaps.
    """

    _pieces: dict[torch.Size, TensorPiece]

    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[TensorPiece]) -> Self:
        """Make a tensor that `pieces` cover without overlap."""
        self = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(cls)
        self._pieces = {torch.Size(piece.offsets): piece for piece in pieces}
        return self

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


class TensorSource:
    """Reader of a checkpoint's tensors in the dtypes of the output; each part is checked against its checksum.

    Args:
        dtype: dtype of floating-point weights in the output; None keeps the stored one. Optimizer state and other
            weights keep theirs.
        progress: advanced by the bytes read.

    Attributes:
        planned: tensors by name, in the dtypes of the output and the chunks of the checkpoint.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, StoredTensor], dtype: torch.dtype | None, progress: Progress
    ) -> None:
        self.folder, self._tensors, self._progress = folder, tensors, progress
        self.planned = {
            name: replace(tensor, dtype=dtype)
            if dtype is not None and name.startswith(MODEL) and tensor.dtype.is_floating_point
            else tensor
            for name, tensor in tensors.items()
        }

    def read(self, name: str) -> Tensor:
        """Read a whole tensor.

        Raises:
            DamagedCheckpoint: the tensor was changed since it was written.
            UserError: the new dtype cannot represent some of its values.
        """
        planned = self.planned[name]
        whole = torch.empty(planned.shape, dtype=planned.dtype)
        for chunk in planned.chunks:
            box = tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box] = self.read_chunk(name, chunk)
        return whole

    def read_chunk(self, name: str, chunk: TensorChunk) -> Tensor:
        """Read a chunk of a tensor; raises the same errors as `read`."""
        try:
            with (self.folder / chunk.file).open("rb", buffering=0) as file:
                stored = read_chunk(file, self.folder, self._tensors[name], chunk)
        except OSError as error:
            raise DamagedCheckpoint(self.folder, f"its {shown(chunk.file)} cannot be read ({error.strerror})") from None
        self._progress.advance(stored.nbytes)
        dtype = self.planned[name].dtype
        if stored.dtype == dtype:
            return stored
        converted = stored.to(dtype)
        if lost := int((stored.isfinite() & ~converted.isfinite()).sum()):
            raise UserError(
                f"{shown(name)} of {shown(self.folder)} has {lost:,} values beyond those of "
                f"{str(dtype).removeprefix('torch.')}, which would become infinite; use --dtype bf16."
            )
        return converted


_ALIGNMENT: Final = 64


def write_safetensors(source: TensorSource, folder: Path, shard_bytes: int) -> list[str]:
    """Write safetensors files and return their names; raise UserError if the format lacks a dtype.

    model.safetensors has the weights, optimizer.safetensors the state as `NAME.STATE`; either may be several files with
    an index.
    """
    names = []
    for prefix, stem in ((MODEL, "model"), (OPTIMIZER, "optimizer")):
        stored = [name for name in source.planned if name.startswith(prefix)]
        if not stored:
            continue
        planned = []
        for name in stored:
            tensor = source.planned[name]
            if tensor.dtype not in CODES:
                raise UserError(
                    f"{shown(name)} is {tensor.dtype}, which safetensors does not have; use --format torch."
                )
            planned.append(Planned(name.removeprefix(prefix), tensor.shape, tensor.dtype))
        with Shards(folder, planned, shard_bytes, stem) as shards:
            for name in stored:
                shards.write({name.removeprefix(prefix): source.read(name)})
            shards.finish()
        names += shards.names
    return names


def write_torch(source: TensorSource, folder: Path) -> list[str]:
    """Write model.pt, a state dict, and optimizer.pt, a dict of states by weight, and return their names.

    Both load with `weights_only=True`.
    """
    weights = [name for name in source.planned if name.startswith(MODEL)]
    states = [name for name in source.planned if name.startswith(OPTIMIZER)]
    scratch = folder / "scratch"
    model = {name.removeprefix(MODEL): tensor for name, tensor in _mapped(source, weights, scratch)}
    torch.save(model, folder / "model.pt")
    del model
    names = ["model.pt"]
    if states:
        optimizer: dict[str, dict[str, Tensor]] = {}
        for name, tensor in _mapped(source, states, scratch):
            weight, _, state = name.removeprefix(OPTIMIZER).rpartition(".")
            optimizer.setdefault(weight, {})[state] = tensor
        torch.save(optimizer, folder / "optimizer.pt")
        names.append("optimizer.pt")
    scratch.unlink(missing_ok=True)
    return names


def write_dcp(source: TensorSource, folder: Path) -> list[str]:
    """Write a `torch.distributed.checkpoint` under Threefold's tensor names, and return the names of its files."""
    before, scratch = set(folder.iterdir()), folder / "scratch"
    tensors = dict(_mapped(source, source.planned, scratch))
    save_tensors_alone(tensors, folder, FileSystemWriter(folder))
    scratch.unlink()
    return sorted(path.name for path in set(folder.iterdir()) - before)


def _mapped(source: TensorSource, names: Iterable[str], scratch: Path) -> list[tuple[str, Tensor]]:
    """Return tensors backed by a memory-mapped scratch file, each with a storage of its own."""
    places: list[tuple[str, int, int]] = []
    scratch.unlink(missing_ok=True)
    with scratch.open("wb") as file:
        for name in names:
            content: Any = source.read(name).reshape(-1).view(torch.uint8).numpy()
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            places.append((name, file.tell(), len(content)))
            file.write(content.data)
        file.write(b"\0")  # an empty file cannot be mapped
    mapped = np.memmap(scratch, dtype=np.uint8, mode="r+")
    found = []
    for name, begin, size in places:
        planned = source.planned[name]
        flat = torch.from_numpy(mapped[begin : begin + size]).view(planned.dtype)
        found.append((name, flat.reshape(planned.shape)))
    return found

"""Conversion of a checkpoint to another format or dtype, one tensor at a time, so that it may exceed the memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

from threefold.checkpoint.errors import AVERAGE, MODEL, OPTIMIZER, DamagedCheckpoint
from threefold.checkpoint.folder import CONFIG, path_of, require_outside_checkpoints
from threefold.checkpoint.index import (
    INDEX,
    StoredTensor,
    TensorChunk,
    index_text,
    name_of,
    read_data_files,
    read_fingerprint,
    read_index,
)
from threefold.checkpoint.manifest import WRITER, Checkpoint, read_manifest, read_writer, write_manifest
from threefold.checkpoint.tensors import ALIGNMENT, ReadableChunk, ReadableTensor, read_chunk, save_tensors_alone
from threefold.dtypes import DTYPES
from threefold.errors import UserError
from threefold.files import shown
from threefold.foreign import FolderFiles
from threefold.host import return_freed_memory
from threefold.huggingface.shards import CODES, Shards, in_groups
from threefold.output import Progress, check_replaceable, staged_directory, write_durably
from threefold.report.checkpoints import choose, group_of, locate, saved_at

Format = Literal["threefold", "safetensors", "torch", "dcp"]


@dataclass(frozen=True)
class Conversion:
    """Request to convert a checkpoint, or a run's newest valid one, into a new folder."""

    source: Path
    out: Path  # a run with one checkpoint if the format is `threefold`
    format: Format = "threefold"
    dtype: str | None = None  # of the weights
    weights_only: bool = False  # without optimizer state and random streams
    shard_bytes: int = 5_000_000_000  # of the tensors of a file
    overwrite: bool = False


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """Result of a conversion."""

    checkpoint: Path
    step: int
    tensors: int
    parameters: int
    bytes: int  # of the tensors written
    dtypes: tuple[str, ...]  # of the weights, by decreasing size
    files: tuple[str, ...]  # of tensors, in the output
    others: tuple[str, ...]  # names of its other files
    warnings: tuple[str, ...]


def convert_checkpoint(request: Conversion, progress: Progress) -> ConvertedCheckpoint:
    """Convert a checkpoint. Damaged checkpoints of a run are skipped in favor of older ones.

    Raises:
        DamagedCheckpoint: the checkpoint that was named is damaged.
        UserError: no checkpoint is valid, a weight does not fit the dtype, or `out` cannot be written; nothing is left.
    """
    return_freed_memory()
    named = locate(request.source)
    require_outside_checkpoints(request.out)
    check_replaceable(request.out, [request.source], request.overwrite)
    damaged: dict[Path, str] = {}
    while True:
        path, warnings = choose(named, damaged)
        try:
            return _convert(request, path, warnings, progress)
        except DamagedCheckpoint as damage:
            if named.checkpoint is not None or damage.path in damaged:
                raise
            damaged[damage.path] = damage.reason


def _convert(request: Conversion, path: Path, warnings: tuple[str, ...], progress: Progress) -> ConvertedCheckpoint:
    checkpoint, index = read_manifest(path), read_index(path)
    kept = {name: tensor for name, tensor in index.items() if not request.weights_only or name.startswith(MODEL)}
    source = TensorSource(path, kept, DTYPES[request.dtype] if request.dtype else None, progress)
    progress.phase("Converting", sum(tensor.bytes for tensor in kept.values()))
    data = {chunk.file for each in index.values() for chunk in each.chunks}
    texts = sorted(checkpoint.files.keys() - data - {INDEX, WRITER})
    with staged_directory(request.out, inputs=[request.source], overwrite=request.overwrite) as staged:
        if request.format == "threefold":
            files = write_run(request, checkpoint, source, texts, staged)
        else:
            _copy(checkpoint, texts, staged)
            if request.format == "safetensors":
                files = _write_safetensors(source, staged, request.shard_bytes)
            else:
                files = (_write_torch if request.format == "torch" else _write_dcp)(source, staged)
    written = source.planned
    weights = group_of({name: tensor for name, tensor in written.items() if name.startswith(MODEL)})
    narrower = any(tensor.itemsize < index[name].itemsize for name, tensor in written.items())
    if narrower and request.format == "threefold" and not request.weights_only:
        warnings = (
            *warnings,
            f"The weights are rounded to {request.dtype}, so a run that is resumed from {shown(request.out)} has other "
            "losses than one that is resumed from the original.",
        )
    sizes = len(written), weights.elements, sum(tensor.bytes for tensor in written.values())
    names = weights.dtypes, tuple(files), tuple(texts)
    return ConvertedCheckpoint(path, checkpoint.facts.step, *sizes, *names, warnings)


def _copy(checkpoint: Checkpoint, names: Sequence[str], folder: Path) -> None:
    for name in names:
        text = FolderFiles(checkpoint.path).text(name)
        checkpoint.check_content(name)
        write_durably(folder / name, text)


class TensorSource:
    """Reader of a checkpoint's tensors, checked, with weights in another dtype: `planned` has shapes and dtypes."""

    def __init__(
        self, folder: Path, tensors: Mapping[str, StoredTensor], dtype: torch.dtype | None, progress: Progress
    ) -> None:
        self.folder, self._tensors, self._progress = folder, tensors, progress
        self._files = FolderFiles(folder)
        self.changes_weights = dtype is not None
        self.planned = dict(tensors)
        for name, tensor in tensors.items():
            if dtype is not None and name.startswith(MODEL) and tensor.dtype.is_floating_point:
                self.planned[name] = replace(tensor, dtype_name=name_of(dtype))

    def read(self, name: str) -> Tensor:
        """Read a whole tensor; DamagedCheckpoint if it was changed, UserError if a value does not fit the new dtype."""
        planned = self.planned[name]
        whole = torch.empty(planned.shape, dtype=planned.dtype)
        for chunk in planned.chunks:
            box = tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box] = self.read_chunk(name, chunk)
        return whole

    def read_chunk(self, name: str, chunk: TensorChunk) -> Tensor:
        try:
            with self._files.opened(chunk.file) as file:
                stored = read_chunk(file, self.folder, self._tensors[name], chunk)
        except OSError as error:
            raise DamagedCheckpoint(self.folder, f"its {shown(chunk.file)} cannot be read ({error.strerror})") from None
        self._progress.advance(stored.nbytes)
        planned = self.planned[name]
        if stored.dtype == planned.dtype:
            return stored
        converted = stored.to(planned.dtype)
        if lost := int((stored.isfinite() & ~converted.isfinite()).sum()):
            raise UserError(
                f"{shown(name)} of {shown(self.folder)} has {lost:,} values beyond those of {planned.dtype_name}, "
                "which would become infinite; use --dtype bf16."
            )
        return converted

    def streamed(self, name: str) -> ReadableTensor:
        """Return a tensor that is read chunk by chunk, with the chunks of the checkpoint."""
        planned = self.planned[name]
        chunks = [
            ReadableChunk(chunk.offsets, chunk.sizes, partial(self.read_chunk, name, chunk)) for chunk in planned.chunks
        ]
        empty = ReadableChunk((0,) * len(planned.shape), planned.shape, partial(self.read, name))
        return ReadableTensor(planned.shape, planned.dtype, chunks or [empty])

    def mapped(self, names: Iterable[str], scratch: Path) -> dict[str, Tensor]:
        """Return tensors backed by a memory-mapped scratch file, each with its own storage."""
        places: dict[str, slice] = {}
        scratch.unlink(missing_ok=True)
        with scratch.open("wb") as file:
            for name in names:
                content: Any = self.read(name).reshape(-1).view(torch.uint8).numpy()
                file.write(b"\0" * (-file.tell() % ALIGNMENT))
                places[name] = slice(file.tell(), file.tell() + len(content))
                file.write(content.data)
            file.write(b"\0")  # an empty file cannot be mapped
        mapped = np.memmap(scratch, dtype=np.uint8, mode="r+")
        return {
            name: torch.from_numpy(mapped[place]).view(self.planned[name].dtype).reshape(self.planned[name].shape)
            for name, place in places.items()
        }


def write_run(
    request: Conversion, checkpoint: Checkpoint, source: TensorSource, texts: Sequence[str], run: Path
) -> list[str]:
    """Write a run with a checkpoint's facts, texts and tensors as `source` reads them; return the tensor files."""
    folder = path_of(run, checkpoint.facts.step)
    folder.mkdir(parents=True)
    _copy(checkpoint, texts, folder)
    tensors: dict[str, StoredTensor] = {}
    files = {}
    for number, group in enumerate(in_groups(source.planned, request.shard_bytes)):
        part = run / f"part-{number}"
        part.mkdir()
        save_tensors_alone({each: source.streamed(each) for each in group}, part)
        name = f"tensors-{number:05d}.bin"
        written, data = read_index(part), read_data_files(part)
        for old, file in data.items():
            (part / old).rename(folder / name)
            files[name] = file
        for each, tensor in written.items():
            tensors[each] = replace(tensor, chunks=tuple(replace(chunk, file=name) for chunk in tensor.chunks))
        (part / INDEX).unlink()
        part.rmdir()
    fingerprint = None if source.changes_weights else read_fingerprint(checkpoint.path)
    write_durably(folder / INDEX, index_text(tensors, files, fingerprint))
    record = read_writer(checkpoint.path)
    weights_only = record.weights_only or request.weights_only
    record = replace(record, saved=saved_at(checkpoint.path, record), weights_only=weights_only)
    if record.layout is not None or weights_only:
        write_durably(folder / WRITER, record.text)
    facts = replace(checkpoint.facts, fingerprint=None) if source.changes_weights else checkpoint.facts
    write_manifest(folder, facts)
    if (folder / CONFIG).exists():
        write_durably(run / CONFIG, FolderFiles(folder).text(CONFIG))
    return [str((folder / name).relative_to(run)) for name in sorted(files)]


def _write_safetensors(source: TensorSource, folder: Path, shard_bytes: int) -> list[str]:
    """Write model, optimizer (state as `NAME.STATE`) and averages, as a file or several with an index; return names."""
    names = []
    for prefix, stem in ((MODEL, "model"), (OPTIMIZER, "optimizer"), (AVERAGE, "average")):
        planned = {name: tensor for name, tensor in source.planned.items() if name.startswith(prefix)}
        for name, tensor in planned.items():
            if tensor.dtype not in CODES:
                raise UserError(
                    f"{shown(name)} is {tensor.dtype}, which safetensors does not have; use --format torch."
                )
        if planned:
            sizes = {name.removeprefix(prefix): tensor for name, tensor in planned.items()}
            with Shards(folder, sizes, shard_bytes, stem) as shards:
                for name in sizes:
                    shards.write({name: source.read(prefix + name)})
            names += shards.names
    return names


def _write_torch(source: TensorSource, folder: Path) -> list[str]:
    """Write model.pt and average.pt, state dicts, and optimizer.pt, states by weight, for `weights_only=True`."""
    scratch, names = folder / "scratch", list[str]()
    for prefix, file in ((MODEL, "model.pt"), (AVERAGE, "average.pt")):
        if chosen := [name for name in source.planned if name.startswith(prefix)]:
            weights = source.mapped(chosen, scratch)
            torch.save({name.removeprefix(prefix): tensor for name, tensor in weights.items()}, folder / file)
            del weights
            names.append(file)
    if states := [name for name in source.planned if name.startswith(OPTIMIZER)]:
        optimizer: dict[str, dict[str, Tensor]] = {}
        for name, tensor in source.mapped(states, scratch).items():
            weight, _, state = name.removeprefix(OPTIMIZER).rpartition(".")
            optimizer.setdefault(weight, {})[state] = tensor
        torch.save(optimizer, folder / "optimizer.pt")
        names.append("optimizer.pt")
    scratch.unlink(missing_ok=True)
    return names


def _write_dcp(source: TensorSource, folder: Path) -> list[str]:
    before, scratch = set(folder.iterdir()), folder / "scratch"
    save_tensors_alone(source.mapped(source.planned, scratch), folder, FileSystemWriter(folder))
    scratch.unlink()
    return sorted(path.name for path in set(folder.iterdir()) - before)

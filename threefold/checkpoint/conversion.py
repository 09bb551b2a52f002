"""Conversion of a checkpoint (`threefold checkpoint convert`) to another format, another dtype, or weights only.

Tensors are converted one at a time, so the model may be larger than memory; each part is checked against its checksum
as it is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from threefold.checkpoint.errors import MODEL, DamagedCheckpoint
from threefold.checkpoint.folder import CONFIG, path_of
from threefold.checkpoint.index import INDEX, StoredTensor, TensorChunk, index_text, read_data_files, read_index
from threefold.checkpoint.listing import locate, saved_at
from threefold.checkpoint.manifest import Manifest, read_manifest, write_manifest
from threefold.checkpoint.plain_files import (
    StreamedTensor,
    TensorPiece,
    TensorSource,
    write_dcp,
    write_safetensors,
    write_torch,
)
from threefold.checkpoint.storage import stored_index
from threefold.checkpoint.summary import bytes_of, choose
from threefold.checkpoint.tensors import save_tensors_alone
from threefold.checkpoint.version1 import METADATA
from threefold.checkpoint.writer import WRITER, read_writer
from threefold.errors import UserError
from threefold.files import shown
from threefold.host import return_freed_memory
from threefold.output import Progress, check_replaceable, staged_directory, write_durably

Format = Literal["threefold", "safetensors", "torch", "dcp"]
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_NOT_COPIED: Final = frozenset((INDEX, WRITER, METADATA))


@dataclass(frozen=True)
class Conversion:
    """Request to convert a checkpoint.

    Attributes:
        source: a checkpoint, or a run whose newest valid checkpoint is taken.
        out: folder to create; a run with one checkpoint if the format is `threefold`.
        dtype: dtype of the weights, a key of `DTYPES`; None keeps the stored one.
        weights_only: whether to leave out optimizer state and random streams.
        shard_bytes: maximum bytes of tensors per file, for formats with several files.
        overwrite: whether an existing folder at `out` is replaced.
    """

    source: Path
    out: Path
    format: Format = "threefold"
    dtype: str | None = None
    weights_only: bool = False
    shard_bytes: int = 5_000_000_000
    overwrite: bool = False


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """Result of a conversion.

    Attributes:
        bytes: size of the tensors written.
        dtypes: dtypes of the weights, by decreasing size.
        files: paths of the tensor files in the output.
        others: names of the other files in the output.
        warnings: sentences about the output for the user.
    """

    checkpoint: Path
    step: int
    tensors: int
    parameters: int
    bytes: int
    dtypes: tuple[str, ...]
    files: tuple[str, ...]
    others: tuple[str, ...]
    warnings: tuple[str, ...]


def convert_checkpoint(request: Conversion, progress: Progress) -> ConvertedCheckpoint:
    """Convert a checkpoint. Damaged checkpoints of a run are skipped in favor of the one before.

    Raises:
        DamagedCheckpoint: the checkpoint that was named is damaged.
        UserError: the run has no valid checkpoint, the dtype cannot represent a weight, or `out` cannot be written.
            Nothing is left at `out` then.
    """
    return_freed_memory()
    named = locate(request.source)
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
    manifest, index = read_manifest(path), stored_index(path)
    kept = {name: tensor for name, tensor in index.items() if not request.weights_only or name.startswith(MODEL)}
    source = TensorSource(path, kept, DTYPES[request.dtype] if request.dtype else None, progress)
    progress.phase("Converting", sum(map(bytes_of, kept.values())))
    texts = sorted(manifest.files.keys() - {chunk.file for each in index.values() for chunk in each.chunks})
    texts = [name for name in texts if name not in _NOT_COPIED]
    with staged_directory(request.out, inputs=[request.source], overwrite=request.overwrite) as staged:
        if request.format == "threefold":
            files = _write_run(request, manifest, source, texts, staged)
        else:
            _copy(manifest, texts, staged)
            if request.format == "safetensors":
                files = write_safetensors(source, staged, request.shard_bytes)
            elif request.format == "torch":
                files = write_torch(source, staged)
            else:
                files = write_dcp(source, staged)
    written = source.planned
    weights = {name: tensor for name, tensor in written.items() if name.startswith(MODEL)}
    dtypes: dict[str, int] = {}
    for tensor in weights.values():
        name = str(tensor.dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + bytes_of(tensor)
    return ConvertedCheckpoint(
        path,
        manifest.facts.step,
        len(written),
        sum(bytes_of(tensor) // tensor.dtype.itemsize for tensor in weights.values()),
        sum(map(bytes_of, written.values())),
        tuple(sorted(dtypes, key=lambda name: -dtypes[name])),
        tuple(files),
        tuple(texts),
        (*warnings, *_consequences(request, index, source)),
    )


def _consequences(request: Conversion, index: Mapping[str, StoredTensor], source: TensorSource) -> list[str]:
    """Return a warning if a run resumed from the output would differ from the original run."""
    if request.format != "threefold" or request.weights_only:
        return []
    narrower = [name for name, tensor in source.planned.items() if tensor.dtype.itemsize < index[name].dtype.itemsize]
    if not narrower:
        return []
    return [
        f"The weights are rounded to {request.dtype}, so a run that is resumed from {shown(request.out)} has other "
        "losses than one that is resumed from the original."
    ]


def _write_run(
    request: Conversion, manifest: Manifest, source: TensorSource, texts: Sequence[str], run: Path
) -> list[str]:
    """Write a run with one checkpoint of version 2, and return its tensor files."""
    folder = path_of(run, manifest.facts.step)
    folder.mkdir(parents=True)
    _copy(manifest, texts, folder)
    tensors: dict[str, StoredTensor] = {}
    files = {}
    for number, share in enumerate(_shares(source.planned, request.shard_bytes)):
        part = run / f"part-{number}"
        part.mkdir()
        save_tensors_alone({name: _streamed(name, source) for name in share}, part)
        name = f"tensors-{number:05d}.bin"
        written, data = read_index(part), read_data_files(part)
        for old, file in data.items():
            (part / old).rename(folder / name)
            files[name] = file
        tensors |= {each: _moved(tensor, name) for each, tensor in written.items()}
        (part / INDEX).unlink()
        part.rmdir()
    write_durably(folder / INDEX, index_text(tensors, files))
    record = read_writer(manifest.folder)
    record = replace(
        record,
        saved=saved_at(manifest.folder, record),
        weights_only=record.weights_only or request.weights_only,
    )
    if record.layout is not None or record.weights_only:
        write_durably(folder / WRITER, record.text)
    write_manifest(folder, manifest.facts)
    if (folder / CONFIG).exists():
        write_durably(run / CONFIG, (folder / CONFIG).read_text(encoding="utf-8"))
    return [str((folder / name).relative_to(run)) for name in sorted(files)]


def _streamed(name: str, source: TensorSource) -> Tensor:
    """Return a tensor that is read chunk by chunk, with the chunks of the source checkpoint."""
    planned = source.planned[name]
    pieces = [
        TensorPiece(chunk.offsets, chunk.sizes, partial(source.read_chunk, name, chunk)) for chunk in planned.chunks
    ]
    empty = [TensorPiece((0,) * len(planned.shape), planned.shape, partial(source.read, name))]
    return StreamedTensor(planned.shape, planned.dtype, pieces or empty)


def _moved(tensor: StoredTensor, file: str) -> StoredTensor:
    chunks: tuple[TensorChunk, ...] = tuple(replace(chunk, file=file) for chunk in tensor.chunks)
    return replace(tensor, chunks=chunks)


def _shares(tensors: Mapping[str, StoredTensor], limit: int) -> list[list[str]]:
    shares: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if shares[-1] and filled + bytes_of(tensor) > limit:
            shares.append([])
            filled = 0
        shares[-1].append(name)
        filled += bytes_of(tensor)
    return shares


def _copy(manifest: Manifest, names: Sequence[str], folder: Path) -> None:
    for name in names:
        manifest.check_content(name)
        try:
            text = (manifest.folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{shown(manifest.folder / name)} cannot be read ({error}); restore it.") from None
        write_durably(folder / name, text)

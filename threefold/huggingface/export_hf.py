"""Export of an own model: beside its weights, which keep its own names, what makes it in plain PyTorch."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from threefold.checkpoint.code import with_code
from threefold.checkpoint.errors import MODEL, DamagedCheckpoint
from threefold.checkpoint.folder import OWN_MODEL, Checkpoint, model_files
from threefold.checkpoint.selection import SelectedCheckpoint, select_checkpoint
from threefold.checkpoint.storage import Planned, Shards
from threefold.checkpoint.tensors import load_tensors_alone, stored_tensors
from threefold.config import Config, ModelConfig
from threefold.config.model import OWN
from threefold.host import return_freed_memory
from threefold.huggingface.config_mapping import choose_type, left_out, write_model
from threefold.huggingface.import_hf import PRECISIONS
from threefold.huggingface.tensor_files import CONFIG as THEIR_CONFIG
from threefold.huggingface.tensor_files import imported_config, split, write_texts
from threefold.models.hf.model_type import HuggingFaceType, WeightMap
from threefold.models.source import file_source
from threefold.output import Progress, check_replaceable, staged_directory

CONSTRUCTOR: Final = "model.json"
"""Says what to call in the model's file, with which keyword arguments, and which of its parameters are stored under
the name of another."""


def write_constructor(config: ModelConfig, folder: Path) -> tuple[str, ...]:
    """Write an own model's file with the modules beside it that it imports, and how to make the model with it.

    Args:
        config: the `model` section of the checkpoint, with the file that makes the model.
        folder: to write to.

    Returns:
        the names of the files written.

    Raises:
        UserError: the file cannot be used, or there is none, as the model was given in Python.
    """
    source = file_source(config)
    name, arguments = source.constructor(config)
    _, plan = source.load_section(config)
    values = {"file": OWN_MODEL, "name": name, "arguments": _plain(arguments), "tied": dict(plan.ties)}
    files = model_files(source.path)
    for copy, path in files.items():
        shutil.copyfile(path, folder / copy)
    (folder / CONSTRUCTOR).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return *files, CONSTRUCTOR


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.settings() if isinstance(value, ModelConfig) else value for name, value in arguments.items()}


_AT_ONCE: Final = 64 << 20
"""Bytes that are read together where single tensors are smaller."""

Stored = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype by name."""


@dataclass(frozen=True)
class Export:
    """What to export.

    Attributes:
        run: a run's folder.
        out: the folder to make.
        shard_bytes: most tensors in a file.
        dtype: of the files, a key of `PRECISIONS`; None for what the run computes in, or, where it made no update, what
            each weight is stored in.
        overwrite: whether a folder at `out` is replaced.
        model: of an own model, the file that makes it; None for the checkpoint's own copy.
        trust_code: whether that copy may be used.
    """

    run: Path
    out: Path
    shard_bytes: int = 5_000_000_000
    dtype: str | None = None
    overwrite: bool = False
    model: str | None = None
    trust_code: bool = False


@dataclass(frozen=True)
class Exported:
    """What was exported.

    Attributes:
        family: model_type of Hugging Face.
        config: the run's.
        step: updates made for the weights.
        parameters: how many.
        dtype: of most of the files.
        bytes: of the weights.
        files: names of the weights' files.
        texts: names of the files beside them.
        left_out: settings of training without a key in the files, with their values.
        warnings: a sentence that names the damaged checkpoints that were passed over, if any were.
    """

    family: str
    config: Config
    step: int
    parameters: int
    dtype: str
    bytes: int
    files: tuple[str, ...]
    texts: tuple[str, ...]
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]


def export_model(request: Export, progress: Progress) -> Exported:
    """Write the newest good checkpoint of a run as Hugging Face's transformers reads it, tensor by tensor.

    One that is found damaged while it is read is skipped.

    Raises:
        UserError: there is no checkpoint, no family fits the model, or `out` cannot be written. Nothing is
            left at `out` then.
    """
    return_freed_memory()
    check_replaceable(request.out, [request.run], request.overwrite)
    damaged: dict[Path, str] = {}
    while True:
        choice = select_checkpoint(
            request.run, lambda none: f"{request.run} has {none}; give the folder of a run.", damaged
        )
        try:
            return _export(request, choice, progress)
        except DamagedCheckpoint as damage:
            damaged[damage.path] = damage.reason


def _export(request: Export, choice: SelectedCheckpoint, progress: Progress) -> Exported:
    checkpoint = choice.checkpoint
    config = with_code(choice.config, checkpoint.path, request.model, request.trust_code)
    imported = imported_config(checkpoint.path)
    own = config.model.architecture == OWN
    kind = None if own else choose_type(config.model, imported.get("model_type"))
    stored = {
        name.removeprefix(MODEL): facts
        for name, facts in stored_tensors(checkpoint.path).items()
        if name.startswith(MODEL)
    }
    weights = dict.fromkeys(stored, None) if kind is None else _by_tensor(kind, config, stored)
    dtypes = {name: _dtype(request, checkpoint, config, dtype) for name, (_, dtype) in stored.items()}
    planned = [
        Planned(tensor, shape, dtypes[name])
        for name, slabs in weights.items()
        for tensor, shape in _shapes(name, stored[name][0], slabs)
    ]
    total = sum(each.bytes for each in planned)
    by_bytes = {dtype: sum(each.bytes for each in planned if each.dtype == dtype) for dtype in dtypes.values()}
    dtype = str(max(by_bytes, key=lambda each: by_bytes[each])).removeprefix("torch.")
    progress.phase("Exporting", total)
    with staged_directory(request.out, inputs=[request.run], overwrite=request.overwrite) as partial:
        if kind is None:
            made = write_constructor(config.model, partial)
        else:
            values = write_model(config.model, kind, dtype, checkpoint.facts.eod, imported)
            (partial / THEIR_CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            made = (THEIR_CONFIG,)
        texts = write_texts(checkpoint.path, partial)
        with Shards(partial, planned, request.shard_bytes) as shards:
            _write(
                checkpoint.path, weights, {name: (stored[name][0], dtypes[name]) for name in weights}, shards, progress
            )
            shards.finish()
    parameters = sum(prod(each.shape) for each in planned)
    lost = () if kind is None else left_out(config.model, kind)
    names = (tuple(shards.names), (*made, *texts))
    family = "own model" if kind is None else kind.name
    return Exported(family, config, checkpoint.step, parameters, dtype, total, *names, lost, choice.warnings)


def _by_tensor(kind: HuggingFaceType, config: Config, stored: Stored) -> dict[str, list[WeightMap]]:
    """The weights made of each of our tensors, in the order of the layers."""
    shapes = {name: stored[name][0] for name in sorted(stored, key=_place)}
    weights: dict[str, list[WeightMap]] = {name: [] for name in shapes}
    for weight in kind.weights(config.model, shapes):
        weights[weight.name].append(weight)
    return weights


def _shapes(name: str, shape: tuple[int, ...], slabs: list[WeightMap] | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of the files that are made of one of ours, and their shapes; of an own model it is that itself."""
    if slabs is None:
        yield name, shape
    else:
        for slab in slabs:
            yield from slab.source_shapes().items()


def _place(name: str) -> tuple[int, int, str]:
    """Order of a tensor in the files: the embedding, the layers by number, the head."""
    first, number, *_ = name.split(".")
    return ("embed", "blocks", "head").index(first), int(number) if number.isdigit() else 0, name


def _dtype(request: Export, checkpoint: Checkpoint, config: Config, stored: torch.dtype) -> torch.dtype:
    if not stored.is_floating_point:  # a buffer of an own model
        return stored
    if request.dtype is not None:
        return PRECISIONS[request.dtype]
    return stored if checkpoint.step == 0 else PRECISIONS[config.precision.dtype]


def _write(
    folder: Path, weights: Mapping[str, list[WeightMap] | None], facts: Stored, shards: Shards, progress: Progress
) -> None:
    for names in _batches(facts):
        ours = {name: torch.empty(facts[name][0], dtype=facts[name][1]) for name in names}
        load_tensors_alone({MODEL + name: tensor for name, tensor in ours.items()}, folder)
        for name in names:
            slabs = weights[name]
            for tensors in [{name: ours[name]}] if slabs is None else [split(slab, ours[name]) for slab in slabs]:
                shards.write(tensors)
                progress.advance(sum(tensor.numel() * facts[name][1].itemsize for tensor in tensors.values()))


def _batches(facts: Stored) -> Iterator[list[str]]:
    """Names whose tensors are read together: one that is large, several that are small."""
    batch: list[str] = []
    filled = 0
    for name, (shape, dtype) in facts.items():
        size = prod(shape) * dtype.itemsize
        if batch and filled + size > _AT_ONCE:
            yield batch
            batch, filled = [], 0
        batch.append(name)
        filled += size
    yield batch

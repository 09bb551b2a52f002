"""`threefold checkpoint export`: write a run's newest checkpoint as a Hugging Face model, tensor by tensor.

A user's own model keeps its tensor names; the export includes the code that makes it in plain PyTorch.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from threefold.checkpoint.code import with_code
from threefold.checkpoint.conversion import Planned, Shards
from threefold.checkpoint.errors import MODEL, DamagedCheckpoint
from threefold.checkpoint.folder import OWN_MODEL, Checkpoint, model_files
from threefold.checkpoint.selection import SelectedCheckpoint, select_checkpoint
from threefold.checkpoint.tensors import load_tensors_alone, stored_tensors
from threefold.config import Config, ModelConfig
from threefold.config.model import OWN
from threefold.host import return_freed_memory
from threefold.huggingface.config_mapping import choose_type, left_out, write_model
from threefold.huggingface.import_hf import PRECISIONS
from threefold.huggingface.tensor_files import CONFIG as THEIR_CONFIG
from threefold.huggingface.tensor_files import imported_config, split, write_texts
from threefold.models.huggingface import HuggingFaceType, WeightMap
from threefold.models.source import file_source
from threefold.output import Progress, check_replaceable, staged_directory

CONSTRUCTOR: Final = "model.json"
"""File that names the class or function in the model's file, its keyword arguments, and its tied parameters."""


def write_constructor(config: ModelConfig, folder: Path) -> tuple[str, ...]:
    """Write the code of a user's own model (its file and the modules it imports), and how to call it.

    Args:
        config: `model` section of the checkpoint, with the file that makes the model.
        folder: destination folder.

    Returns:
        names of the files written.

    Raises:
        UserError: the file cannot be used, or the model was given in Python and has no file.
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
"""Bytes of small tensors that are read together."""

Stored = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Export:
    """Request to export the run folder `run` to a new folder `out`.

    Attributes:
        shard_bytes: maximum bytes of tensors in one file.
        dtype: dtype of the files, a key of `PRECISIONS`; None keeps the run's compute dtype, or each weight's stored
            dtype if the run made no update.
        overwrite: whether an existing folder at `out` is replaced.
        model: for a user's own model, the file that makes it; None uses the checkpoint's copy.
        trust_code: whether the checkpoint's copy of the code may be executed.
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
    """Summary of an export.

    Attributes:
        family: Hugging Face model_type.
        step: number of updates that made the weights.
        parameters: parameter count.
        dtype: dtype of most of the weights, by bytes.
        bytes: size of the weights.
        files, texts: names of the weight files, and of the other files.
        left_out: training settings that the files have no key for, with their values.
        warnings: a sentence that names the damaged checkpoints that were skipped, if any.
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
    """Write the newest good checkpoint of a run in the format of Hugging Face transformers, tensor by tensor.

    A checkpoint that turns out to be damaged while it is read is skipped.

    Raises:
        UserError: there is no checkpoint, no family fits the model, or `out` cannot be written. Nothing is left at
            `out` then.
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
    shapes = {name: stored[name][0] for name in sorted(stored, key=_place)}
    weights: dict[str, list[WeightMap]] = {name: [] for name in shapes}
    for weight in kind.weights(config.model, shapes):
        weights[weight.name].append(weight)
    return weights


def _shapes(name: str, shape: tuple[int, ...], slabs: list[WeightMap] | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the tensors written for one of ours; an own model's tensor is written as it is."""
    if slabs is None:
        yield name, shape
    else:
        for slab in slabs:
            yield from slab.source_shapes().items()


def _place(name: str) -> tuple[int, int, str]:
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
    """Yield the names of tensors to read together: a large one alone, small ones in groups."""
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

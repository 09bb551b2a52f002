"""`threefold checkpoint export`: write a run's newest checkpoint as a Hugging Face model, tensor by tensor."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from threefold.adapters.merging import Factors, factors_of
from threefold.checkpoint.code import with_code
from threefold.checkpoint.folder import MODEL_FILE, SelectedCheckpoint, code_text, model_files
from threefold.checkpoint.index import StoredTensor, name_of, weight_names
from threefold.checkpoint.tensors import load_tensors, read_tensor, stored_tensors
from threefold.config import Config, ModelConfig
from threefold.config.model import CUSTOM
from threefold.dtypes import DTYPES
from threefold.foreign import write_nofollow
from threefold.host import return_freed_memory
from threefold.huggingface.files import CONFIG as THEIR_CONFIG
from threefold.huggingface.files import choose_type, imported_config, left_out, split, write_model, write_texts
from threefold.huggingface.mapping import WeightMap
from threefold.huggingface.shards import Shards, in_groups
from threefold.huggingface.source import export_undamaged
from threefold.models.family import model_plan
from threefold.models.source import bound_arguments, file_source
from threefold.output import Progress, check_replaceable, staged_directory

CONSTRUCTOR: Final = "model.json"
"""File that names the class or function in the model's file, its keyword arguments, and its tied parameters."""


@dataclass(frozen=True)
class Export:
    """Request to export the run folder `run` to a new folder `out`."""

    run: Path
    out: Path
    shard_bytes: int = 5_000_000_000  # of the tensors in one file
    dtype: str | None = None  # None for the run's compute dtype, or each weight's stored one if it made no update
    overwrite: bool = False
    model: str | None = None  # with `trust_code`, as in `with_code`
    trust_code: bool = False
    average: bool = False  # as in `weight_names`
    step: str | None = None  # as in `select_checkpoint`


@dataclass(frozen=True)
class Exported:
    """Summary of an export."""

    family: str  # Hugging Face's model_type
    config: Config
    step: int
    parameters: int
    dtype: str  # of most of the weights, by bytes
    bytes: int  # of the weights
    files: tuple[str, ...]
    texts: tuple[str, ...]  # names of the other files
    left_out: tuple[str, ...]  # training settings that the files have no key for, with their values
    warnings: tuple[str, ...]


def export_model(request: Export, progress: Progress) -> Exported:
    """Write a run's newest checkpoint that proves undamaged in the format of transformers, tensor by tensor."""
    check_replaceable(request.out, [request.run], request.overwrite)
    return_freed_memory()
    return export_undamaged(request.run, request.step, lambda choice: _export(request, choice, progress))


def _export(request: Export, choice: SelectedCheckpoint, progress: Progress) -> Exported:
    checkpoint = choice.checkpoint
    config = with_code(choice.config, checkpoint.path, request.model, request.trust_code)
    imported = imported_config(checkpoint.path)
    custom = config.model.architecture == CUSTOM
    kind = None if custom else choose_type(config.model, imported.get("model_type"))
    read, facts = weight_names(checkpoint.path, request.average), stored_tensors(checkpoint.path)
    stored, adapters = {name: facts[key] for name, key in read.items()}, factors_of(config)
    for factors in adapters.values():  # which the weights will have merged
        for name in factors.names:
            del stored[name]
    names = list(stored) if kind is None else sorted(stored, key=_place)
    weights: dict[str, list[WeightMap]] = {name: [] for name in names}
    for weight in () if kind is None else kind.weights(config.model, {name: stored[name][0] for name in names}):
        weights[weight.name].append(weight)
    chosen = DTYPES[request.dtype or config.precision.dtype] if request.dtype or checkpoint.step else None
    plan = None if custom else model_plan(config.model, 1)
    # An integer buffer of a custom model and the biases of experts keep their dtype.
    dtypes = {
        name: chosen if chosen and dtype.is_floating_point and not (plan and plan.initializes_buffer(name)) else dtype
        for name, (_, dtype) in stored.items()
    }
    planned = {
        tensor: StoredTensor(shape, name_of(dtypes[name]))
        for name, slabs in weights.items()
        for shapes in ([{name: stored[name][0]}] if kind is None else [slab.source_shapes() for slab in slabs])
        for tensor, shape in shapes.items()
    }
    total, by_bytes = sum(each.bytes for each in planned.values()), Counter[str]()
    for each in planned.values():
        by_bytes[each.dtype_name] += each.bytes
    dtype = max(by_bytes, key=lambda each: by_bytes[each])
    progress.phase("Exporting", total)
    with staged_directory(request.out, inputs=[request.run], overwrite=request.overwrite) as partial:
        if kind is None:
            made = _write_constructor(config.model, partial)
        else:
            values = write_model(config.model, kind, dtype, checkpoint.facts.eod, imported)
            write_nofollow(partial / THEIR_CONFIG, json.dumps(values, indent=2) + "\n")
            made = (THEIR_CONFIG,)
        texts = write_texts(checkpoint.path, partial, checkpoint.facts.eod)
        with Shards(partial, planned, request.shard_bytes) as shards:
            sizes = {
                name: StoredTensor(stored[name][0], name_of(stored[name][1] if name in adapters else dtypes[name]))
                for name in weights
            }
            for group in in_groups(sizes, 64 << 20):  # small tensors are read together
                ours = {name: torch.empty(size.shape, dtype=size.dtype) for name, size in group.items()}
                load_tensors({read[name]: tensor for name, tensor in ours.items()}, checkpoint.path, alone=True)
                for name, tensor in ours.items():
                    if name in adapters:
                        tensor = _merged(tensor, adapters[name], checkpoint.path, read).to(dtypes[name])
                    parts = [{name: tensor}] if kind is None else [split(slab, tensor) for slab in weights[name]]
                    for tensors in parts:
                        shards.write(tensors)
                        progress.advance(sum(each.nbytes for each in tensors.values()))
    parameters = sum(prod(stored[name][0]) for name in names)  # files may repeat one
    lost = () if kind is None else left_out(config.model, kind)
    written = (tuple(shards.names), (*made, *texts))
    family = "own model" if kind is None else kind.name
    return Exported(family, config, checkpoint.step, parameters, dtype, total, *written, lost, choice.warnings)


def _merged(weight: Tensor, factors: Factors, checkpoint: Path, names: Mapping[str, str]) -> Tensor:
    """Return a weight with its adapter merged; `names` are those of a checkpoint's tensors, by ours."""
    return factors.merged(weight, *(read_tensor(checkpoint, names[each]) for each in factors.names))


def _place(name: str) -> tuple[int, int, str]:
    first, number, *_ = name.split(".")
    return ("embed", "blocks", "head").index(first), int(number) if number.isdigit() else 0, name


def _write_constructor(config: ModelConfig, folder: Path) -> tuple[str, ...]:
    """Write the code of a custom model (its file and its imports) and how to call it; return the names."""
    source = file_source(config)
    factory, _ = source.parts()
    name, given = factory.__name__, {"config": config}
    if name != "make_model":
        given = bound_arguments(factory, config, f"{source.path.name}: {name}")
    arguments = {key: value.settings() if isinstance(value, ModelConfig) else value for key, value in given.items()}
    _, plan = source.load_section(config)
    values = {"file": MODEL_FILE, "name": name, "arguments": arguments, "tied": dict(plan.ties)}
    files = model_files(source.path)
    for copy, path in files.items():
        write_nofollow(folder / copy, code_text(path))
    write_nofollow(folder / CONSTRUCTOR, json.dumps(values, indent=2) + "\n")
    return *files, CONSTRUCTOR

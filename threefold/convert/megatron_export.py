"""Export of a run's checkpoint in the format `torch_dist` of Megatron-LM: weights and arguments, layer by layer."""

import json
from argparse import Namespace
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

from threefold.checkpoint.folder import SelectedCheckpoint
from threefold.checkpoint.index import weight_names
from threefold.checkpoint.tensors import ReadableChunk, ReadableTensor, read_tensor, save_tensors_alone, stored_tensors
from threefold.config import Config, resolve
from threefold.config.loading import config_of
from threefold.convert.megatron_files import COMMON, LAYERS
from threefold.convert.megatron_models import LATEST, read_model, weight_maps, write_args
from threefold.dtypes import DTYPES
from threefold.errors import UserError
from threefold.files import shown
from threefold.foreign import write_nofollow
from threefold.host import return_freed_memory
from threefold.huggingface.files import split
from threefold.huggingface.mapping import WeightMap
from threefold.huggingface.source import export_undamaged
from threefold.output import Progress, check_replaceable, staged_directory


@dataclass(frozen=True)
class ExportedMegatron:
    """Summary of an export; `step` counts the updates after which the weights are."""

    config: Config
    step: int
    parameters: int
    dtype: str
    warnings: tuple[str, ...]


def export_megatron(
    run: Path, out: Path, dtype: str | None, overwrite: bool, average: bool, step: str | None, progress: Progress
) -> ExportedMegatron:
    """Write a run's newest checkpoint that proves undamaged as a folder of checkpoints of Megatron-LM."""
    check_replaceable(out, [run], overwrite)
    return_freed_memory()
    return export_undamaged(run, step, lambda choice: _export(choice, run, out, dtype, overwrite, average, progress))


def _export(
    choice: SelectedCheckpoint,
    run: Path,
    out: Path,
    dtype: str | None,
    overwrite: bool,
    average: bool,
    progress: Progress,
) -> ExportedMegatron:
    checkpoint, config = choice.checkpoint, choice.config
    check_model(config)
    read, facts = weight_names(checkpoint.path, average), stored_tensors(checkpoint.path)
    shapes = {name: facts[key][0] for name, key in read.items()}
    chosen = DTYPES[dtype or config.precision.dtype] if dtype or checkpoint.step else None

    def chunk(weight: WeightMap, tensor: str, layer: int | None) -> ReadableChunk:
        sizes = weight.shape if layer is None else (1, *weight.shape)
        offsets = (0,) * len(sizes) if layer is None else (layer, *(0 for _ in weight.shape))

        def read_tensors() -> Tensor:
            stored = read_tensor(checkpoint.path, read[weight.name])
            made = split(weight, stored.to(chosen) if chosen else stored)[tensor].reshape(sizes).contiguous()
            progress.advance(made.nbytes)
            return made

        return ReadableChunk(offsets, sizes, read_tensors)

    layers = config.model.num_layers
    chunks: dict[str, list[tuple[WeightMap, ReadableChunk]]] = {}
    for weight in weight_maps(shapes, ()):
        (tensor,) = weight.source_shapes()
        layer = int(weight.name.split(".")[1]) if weight.name.startswith("blocks.") else None
        name = tensor if layer is None else tensor.replace(f"{LAYERS}{layer}.", LAYERS)
        chunks.setdefault(name, []).append((weight, chunk(weight, tensor, layer)))
    tensors: dict[str, Any] = {}
    for name, parts in chunks.items():
        weight = parts[0][0]
        shape = (layers, *weight.shape) if name.startswith(LAYERS) else weight.shape
        kind = chosen or facts[read[weight.name]][1]
        tensors[name] = ReadableTensor(shape, kind, [each for _, each in parts])
        if len(shape) == 3:  # an object without content, which Megatron-LM asks for
            module = name.removesuffix("weight")
            tensors |= {f"{module}_extra_state/shard_{layer}_{layers}": [None] for layer in range(layers)}
    parameters = sum(map(prod, shapes.values()))
    progress.phase("Exporting", sum(each.nbytes for each in tensors.values() if isinstance(each, Tensor)))
    with staged_directory(out, inputs=[run], overwrite=overwrite) as staged:
        folder = staged / f"iter_{checkpoint.step:07d}"
        folder.mkdir()
        save_tensors_alone(tensors, folder, FileSystemWriter(folder))
        args = Namespace(**write_args(config.model), consumed_train_samples=checkpoint.facts.consumed_samples)
        common = {"args": args, "checkpoint_version": 3.0, "iteration": checkpoint.step}
        torch.save(common, folder / COMMON)
        backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
        versions = {f"{name}_version": 1 for name in backends}
        write_nofollow(folder / "metadata.json", json.dumps(backends | versions))
        write_nofollow(staged / LATEST, str(checkpoint.step))
    name = dtype or (config.precision.dtype if checkpoint.step else "as stored")
    return ExportedMegatron(config, checkpoint.step, parameters, name, choice.warnings)


def check_model(config: Config) -> None:
    """Raise UserError for a model that the arguments of Megatron-LM, as they are read here, do not describe."""
    if config.adapter.rank:
        raise UserError(
            "The run has adapters, which the format of Megatron-LM has no place for; export it for Hugging Face, which "
            "merges them, import that, and export the import."
        )
    model = config.model
    if model.architecture not in ("gpt", "llama"):
        raise UserError(
            f"model.architecture is {model.architecture} and the format of Megatron-LM is written for gpt and llama; "
            "export it for Hugging Face."
        )
    found = read_model(write_args(model), "the export")
    length = {"path": "tokens", "sequence_length": found["max_position_embeddings"]}
    theirs = resolve(config_of({"model": found, "data": length}), 1).model
    for name, value in model.settings().items():
        if name not in ("preset", "file") and getattr(theirs, name) != value:
            raise UserError(
                f"model.{name} is {shown(str(value))}, which the args of Megatron-LM have no place for here; export it "
                "for Hugging Face."
            )

"""Adapters (LoRA) in the format of the package `peft`: `adapter_config.json` beside `adapter_model.safetensors`.

The layers are those of the model in transformers. A layer of ours that computes several projections, such as queries,
keys and values, is several layers there, or a fused one, whose adapter then has the ranks of its projections together.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from threefold.adapters.attach import projections
from threefold.adapters.merging import Factors, factors_of
from threefold.checkpoint.folder import SelectedCheckpoint
from threefold.checkpoint.index import StoredTensor, name_of, weight_names
from threefold.checkpoint.tensors import read_tensor, stored_tensors
from threefold.config import Config
from threefold.config.adapter import AdapterConfig
from threefold.config.model import CUSTOM
from threefold.dtypes import DTYPES
from threefold.errors import UserError
from threefold.foreign import write_nofollow
from threefold.huggingface.files import SOURCE, choose_type, imported_config, split
from threefold.huggingface.mapping import HuggingFaceType, Shapes, WeightMap
from threefold.huggingface.shards import Shards
from threefold.huggingface.source import export_undamaged
from threefold.models.family import model_plan
from threefold.models.sharding import Column, ModelPlan
from threefold.output import staged_directory

CONFIG: Final = "adapter_config.json"
STEM: Final = "adapter_model"
MAGNITUDES: Final = "lora_magnitude_vector"
_PREFIX: Final = "base_model.model."
_WEIGHT: Final = ".weight"


@dataclass(frozen=True)
class Layer:
    """Layer of transformers that has an adapter, or could have one.

    Attributes:
        path: its name in the model of transformers.
        weight: our weight that has its rows.
        rows: the rows of our weight, in its order [out].
        names: the projection of each row; an empty name for a layer of one projection.
        parts: the distinct names, in our order.
        is_transposed: whether transformers holds its weight as [in, out].
    """

    path: str
    weight: str
    rows: Tensor
    names: tuple[str, ...]
    parts: tuple[str, ...]
    is_transposed: bool = False


def norms_of_rows(weight: Tensor) -> Tensor:
    """Return the norm of each row of a weight, in fp32 at least."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32)).norm(dim=1)


def layers_of(kind: HuggingFaceType, config: Config, shapes: Shapes) -> Iterator[Layer]:
    """Yield the layers of the model in transformers; `shapes` are those of our weights without adapters."""
    plan = model_plan(config.model, 1)
    for weight in kind.weights(config.model, shapes):
        if not weight.name.endswith(_WEIGHT) or len(weight.shape) != 2:
            continue
        names = _names_of_rows(plan, weight)
        rows = torch.arange(weight.shape[0])
        whole = replace(weight, shape=(len(rows), 1), transposed=False)
        for tensor, held in split(whole, rows.unsqueeze(1)).items():
            own = held.squeeze(1)
            of_rows = tuple(names[row] for row in own.tolist())
            parts = tuple(name for name in dict.fromkeys(names) if name in of_rows)
            yield Layer(tensor.removesuffix(_WEIGHT), weight.name, own, of_rows, parts, weight.transposed)


def _names_of_rows(plan: ModelPlan, weight: WeightMap) -> list[str]:
    """Return the name of the projection of each row of a weight."""
    rule = plan.split_of(weight.name)
    spans = projections(rule.unit) if isinstance(rule, Column) else {}
    if not spans or rule is None:
        return [""] * weight.shape[0]
    period = [name for name, (start, end) in spans.items() for _ in range(start, end)]
    return period * (weight.shape[0] // len(period))


@dataclass(frozen=True)
class ExportedAdapter:
    """Summary of an export of adapters."""

    family: str  # Hugging Face's model_type
    step: int
    layers: int
    parameters: int
    targets: tuple[str, ...]
    warnings: tuple[str, ...]


def export_adapter(
    run: Path,
    out: Path,
    dtype: str | None = None,
    overwrite: bool = False,
    average: bool = False,
    step: str | None = None,
    base: str | None = None,
) -> ExportedAdapter:
    """Write the adapters of a run's checkpoint, the newest by default that proves undamaged, for `peft`.

    `base` is the folder or id of the model in transformers, by default what the run's model was imported from.
    """
    return export_undamaged(run, step, lambda choice: _export(choice, run, out, dtype, overwrite, average, base))


def _export(
    choice: SelectedCheckpoint,
    run: Path,
    out: Path,
    dtype: str | None,
    overwrite: bool,
    average: bool,
    base: str | None,
) -> ExportedAdapter:
    checkpoint, config = choice.checkpoint, choice.config
    adapter = config.adapter
    if not adapter.rank:
        raise UserError(f"{checkpoint.path} has no adapters (adapter.rank is 0); export it without --adapter.")
    if config.model.architecture == CUSTOM:
        raise UserError(
            f"{checkpoint.path} is of a model of your own, of which peft knows no layers; export it without --adapter, "
            "which merges the adapters into the weights."
        )
    imported = imported_config(checkpoint.path)
    kind = choose_type(config.model, imported.get("model_type"))
    stored, adapters = stored_tensors(checkpoint.path), factors_of(config)
    names = weight_names(checkpoint.path, average)
    factors = {name for each in adapters.values() for name in each.names}
    layers = list(layers_of(kind, config, {name: stored[key][0] for name, key in names.items() if name not in factors}))
    known = {layer.weight for layer in layers}
    for name in adapters:
        if name not in known or "router" in name:
            raise UserError(
                f"{checkpoint.path} has an adapter of {name.removesuffix(_WEIGHT)}, which is no linear layer of "
                f"{kind.name} in transformers, so that peft has none of it; export it without --adapter, which merges "
                "the adapters into the weights."
            )
    found: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for layer in layers:
        if layer.weight not in adapters:
            continue
        chosen = adapters[layer.weight]
        parts = _parts_in(chosen, layer, model_plan(config.model, 1))
        if not parts:
            continue
        a, b = (read_tensor(checkpoint.path, names[each]) for each in (chosen.a, chosen.b))
        path = f"{_PREFIX}{layer.path}."
        if chosen.is_table:
            found |= {f"{path}lora_embedding_A": a, f"{path}lora_embedding_B": b}
            ranks[layer.path] = adapter.rank
            continue
        columns = torch.cat([torch.arange(adapter.rank) + part * adapter.rank for part in parts])
        spread = chosen.adapter.spread(b)[layer.rows]
        found |= {f"{path}lora_A.weight": a[columns], f"{path}lora_B.weight": spread[:, columns]}
        if chosen.magnitude is not None:
            weight, change = (read_tensor(checkpoint.path, names[each]) for each in (layer.weight, chosen.magnitude))
            found[f"{path}{MAGNITUDES}"] = norms_of_rows(weight)[layer.rows] + change[layer.rows]
        ranks[layer.path] = len(columns)
    wanted = None if dtype is None else DTYPES[dtype]
    found = {name: tensor if wanted is None else tensor.to(wanted) for name, tensor in found.items()}
    planned = {name: StoredTensor(tuple(tensor.shape), name_of(tensor.dtype)) for name, tensor in found.items()}
    values = _config_json(
        adapter, ranks, [layer.path for layer in layers], kind, any(layer.is_transposed for layer in layers)
    )
    values["base_model_name_or_path"] = base or imported.get(SOURCE)
    with staged_directory(out, inputs=[run], overwrite=overwrite) as partial:
        write_nofollow(partial / CONFIG, json.dumps(values, indent=2) + "\n")
        with Shards(partial, planned, 1 << 62, STEM) as shards:
            shards.write(found)
    count, targets = sum(tensor.numel() for tensor in found.values()), tuple(values["target_modules"])
    return ExportedAdapter(kind.name, checkpoint.step, len(ranks), count, targets, choice.warnings)


def _parts_in(factors: Factors, layer: Layer, plan: ModelPlan) -> list[int]:
    """Return which blocks of A's rows belong to the projections that a layer computes; empty if none has an adapter."""
    spans = factors.adapter.spans
    if spans is None:
        return [0]
    rule = plan.split_of(layer.weight)
    assert isinstance(rule, Column)
    names = [name for name, span in projections(rule.unit).items() if span in spans]
    return [number for number, name in enumerate(names) if name in layer.parts]


def _config_json(
    adapter: AdapterConfig, ranks: Mapping[str, int], every: Sequence[str], kind: HuggingFaceType, is_transposed: bool
) -> dict[str, Any]:
    """Return the adapter_config.json; layers are named by their last part if all layers of that name have adapters."""
    short = {path.rpartition(".")[2] for path in ranks}
    short = {last for last in short if all(path in ranks for path in every if path.rpartition(".")[2] == last)}
    targets = sorted({last if (last := path.rpartition(".")[2]) in short else path for path in ranks})
    wider = {path: rank for path, rank in ranks.items() if rank != adapter.rank}
    scaled = {path: adapter.factor * (sqrt(rank) if adapter.rank_stabilized else rank) for path, rank in wider.items()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha if adapter.alpha is not None else adapter.rank,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rank_stabilized,
        "use_dora": adapter.dora,
        "target_modules": targets,
        "rank_pattern": wider,
        "alpha_pattern": scaled,
        "fan_in_fan_out": is_transposed,
        "bias": "none",
    }

"""Comparison of what a checkpoint is exported to: a model of Hugging Face, with adapters merged, and adapters alone."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
from torch import Tensor, nn

from threefold.adapters.merging import Factors, factors_of
from threefold.checkpoint.errors import MODEL
from threefold.checkpoint.folder import path_of
from threefold.checkpoint.tensors import load_tensors, stored_tensors
from threefold.config import Config
from threefold.config.model import CUSTOM
from threefold.dtypes import DTYPES
from threefold.errors import UserError
from threefold.huggingface.export_hf import Export, export_model
from threefold.huggingface.files import choose_type
from threefold.huggingface.import_hf import Import, import_model
from threefold.huggingface.peft_format import export_adapter, norms_of_rows
from threefold.huggingface.peft_import import PeftAdapter
from threefold.models.layers.experts import Experts
from threefold.models.source import ConfigSource, ModelSource
from threefold.output import SILENT
from threefold.verify.compare import Comparison

FILE_BYTES: Final = 16 << 10
"""Size that divides even a shrunk model's weights into several files."""


def is_exported(source: ModelSource, config: Config) -> bool:
    """Return whether a model of Hugging Face fits the config."""
    if not isinstance(source, ConfigSource) or config.model.architecture == CUSTOM:
        return False
    try:
        choose_type(config.model, None)
    except UserError:
        return False
    return True


def compare_exports(comparison: Comparison, config: Config, folder: Path, place: int) -> None:
    """Export the only checkpoint in a folder, that of a place of the trace, read the exports back, and compare them."""
    expected, leverage = comparison.expected.weights[place], comparison.expected.leverage
    adapters = factors_of(config)
    with TemporaryDirectory(dir=folder.parent) as made:  # apart from what is read
        theirs, back, alone = (Path(made) / name for name in ("export", "back", "adapter"))
        export_model(Export(folder, theirs, FILE_BYTES, config.precision.dtype), SILENT)
        import_model(Import(theirs, back, allow_not_finite=True), SILENT)
        path = path_of(back, 0)
        read = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored_tensors(path).items()}
        load_tensors(read, path, alone=True)
        weights = {name.removeprefix(MODEL): tensor for name, tensor in read.items()}
        moved = _merged_leverage(expected, leverage, adapters)
        comparison.exported(place, weights, _merged(config, expected, adapters), moved)
        if not adapters:
            return
        try:
            export_adapter(folder, alone)
        except UserError:  # of layers of which `peft` has no adapters, such as experts
            return
        kind = choose_type(config.model, None)
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        _, factors = PeftAdapter(alone).section_and_weights(
            kind, config, shapes, lambda layer: norms_of_rows(expected[layer.weight][layer.rows])
        )
        named = {name for each in adapters.values() for name in each.names}
        comparison.exported(place, factors, {name: expected[name] for name in named}, leverage)


@torch.no_grad()
def _merged(config: Config, weights: Mapping[str, Tensor], adapters: Mapping[str, Factors]) -> dict[str, Tensor]:
    """Return the weights that a model with merged adapters has: what its layers compute of each basis vector."""
    make_model, plan = ConfigSource().load(config)
    model = make_model().to(DTYPES[config.precision.dtype]).eval()
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[plan.whole_name(name)])
    found = dict(weights)
    for name, factors in adapters.items():
        for each in factors.names:
            del found[each]
        found[name] = _computed(model.get_submodule(name.rpartition(".")[0]), name, weights[name])
    return found


def _computed(module: nn.Module, name: str, weight: Tensor) -> Tensor:
    if isinstance(module, nn.Embedding):
        rows: Tensor = module(torch.arange(len(weight)))
        return rows
    units = torch.eye(weight.shape[-1], dtype=weight.dtype)
    if isinstance(module, Experts):
        counts = torch.full((len(weight),), len(units))
        columns = module.linear(units.repeat(len(weight), 1), getattr(module, name.rpartition(".")[2]), counts)
        return columns.unflatten(0, (len(weight), -1)).mT
    columns = module(units)
    return (columns if module.bias is None else columns - module.bias).mT


def _merged_leverage(
    weights: Mapping[str, Tensor], leverage: Mapping[str, Tensor], adapters: Mapping[str, Factors]
) -> dict[str, Tensor]:
    """Return the effect of a gradient error on merged weights, from that on the factors of the adapters."""
    found = dict(leverage)
    for name, each in adapters.items():
        of_a, of_b = each.merged(leverage[name], leverage[each.a], weights[each.b].abs()), leverage[each.b]
        found[name] = each.merged(of_a, weights[each.a].abs(), of_b)
        if each.magnitude is not None:  # of which no element moves more than its row's magnitude
            found[name] += leverage[each.magnitude].unsqueeze(-1)
    return found

"""Whether the tensors of a checkpoint match the model that its config describes."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch

from threefold.checkpoint.errors import MODEL
from threefold.checkpoint.tensors import stored_tensors
from threefold.config import ModelConfig
from threefold.errors import UserError
from threefold.files import shown
from threefold.models.family import make_model
from threefold.models.sharding import ModelPlan
from threefold.torch_private.tensors import persistent_buffers

_SIZES: Final[Mapping[str, tuple[str | None, ...]]] = {
    "embed.tokens.weight": ("vocab_size", "hidden_size"),
    "embed.positions.weight": ("max_position_embeddings", None),
    "blocks.0.mlp.down.weight": (None, "ffn_hidden_size"),
}
"""Settings that determine the dims of a weight."""


Shapes = Mapping[str, tuple[int, ...]]


def model_mismatch(model: ModelConfig, stored: Shapes) -> str | None:
    """Return why the stored weights do not match a resolved model config, as a clause; None if they match.

    Single tensors are compared first, so that a config of a billion layers is refused at once.
    """
    return next(_misfits(model, _weights(stored)), None)


def _weights(stored: Shapes) -> Shapes:
    return {name.removeprefix(MODEL): shape for name, shape in stored.items() if name.startswith(MODEL)}


def require_match(model: ModelConfig, plan: ModelPlan, checkpoint: Path) -> None:
    """Check that a checkpoint's weights match a custom model as its file defines it now.

    Raises:
        UserError: a weight is missing, unknown or of another shape.
    """
    weights = _weights({name: shape for name, (shape, _) in stored_tensors(checkpoint).items()})
    with torch.device("meta"):
        made = make_model(model)
    expected = {plan.whole_name(name): tuple(weight.shape) for name, weight in made.named_parameters()}
    for prefix, module in made.named_modules():
        for name, buffer in persistent_buffers(module):
            whole = plan.whole_name(f"{prefix}.{name}" if prefix else name)
            if whole in weights:  # checkpoints of older versions have none
                expected[whole] = tuple(buffer.shape)
    if reason := next(_differences(expected, weights), None):
        raise UserError(
            f"The model of {shown(model.file)} is not the one that {checkpoint} was made with: {reason}; restore the "
            "file, or start a new run in another folder."
        )


def _differences(expected: Shapes, weights: Shapes) -> Iterator[str]:
    for name in [*expected, *sorted(weights.keys() - expected.keys())]:
        if name not in weights:
            yield f"it has {name}, which the checkpoint lacks"
        elif name not in expected:
            yield f"the checkpoint has {name}, which it lacks"
        elif weights[name] != expected[name]:
            yield f"its {name} is {_shown(expected[name])} and the checkpoint's is {_shown(weights[name])}"


def _misfits(model: ModelConfig, weights: Shapes) -> Iterator[str]:
    layers = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    if len(layers) != model.num_layers:
        yield f"its config has model.num_layers {model.num_layers} and its tensors are those of {len(layers)} layers"
    for name, keys in _SIZES.items():
        for key, size in zip(keys, weights.get(name, ()), strict=False):
            if key is not None and getattr(model, key) != size:
                yield f"its config has model.{key} {getattr(model, key)} and its tensor {name} has {size}"
    with torch.device("meta"):
        expected = {name: tuple(weight.shape) for name, weight in make_model(model).named_parameters()}
    for missing in sorted(expected.keys() - weights.keys()):
        yield f"its config describes a model with {missing}, which is not among its tensors"
    for unknown in sorted(weights.keys() - expected.keys()):
        yield f"its tensors hold {unknown}, which the model that its config describes does not have"
    for name, shape in expected.items():
        if weights[name] != shape:
            found = _shown(weights[name])
            yield f"its config describes a model whose {name} is {_shown(shape)} and its tensor of that name is {found}"


def _shown(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "a number"

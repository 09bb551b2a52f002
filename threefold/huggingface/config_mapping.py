"""Conversion between config.json and the `model` settings, for every family."""

from collections.abc import Collection, Mapping
from typing import Any

from threefold.config import ModelConfig
from threefold.errors import UserError
from threefold.models.family import huggingface_types
from threefold.models.huggingface import ConfigJson, HuggingFaceType, shortened

_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys about tokens that an export keeps from the imported config.json."""


def read_model(
    values: Mapping[str, Any], where: str, ignored: Collection[str] = ()
) -> tuple[HuggingFaceType, dict[str, Any]]:
    """Return the model type that a config.json names, and the `model` settings it describes.

    Args:
        values: content of the config.json.
        where: name of the file, for error messages.
        ignored: keys to ignore.

    Raises:
        UserError: the model type is unknown, or the config has something unsupported.
    """
    name, types = values.get("model_type"), huggingface_types()
    if not isinstance(name, str) or name not in types:
        raise UserError(
            f"{where}: model_type is {shortened(repr(name))} and Threefold reads {', '.join(types)}; "
            "give a model of one of these families."
        )
    kind = types[name]
    given = ConfigJson(values, kind.defaults, where)
    given.take("model_type")
    if given.take("quantization_config"):
        raise given.problem("quantization_config means that the weights are quantised", "take a copy that is not")
    settings = kind.read(given)
    given.finish(ignored)
    return kind, {"architecture": kind.architecture, **settings}


def choose_type(model: ModelConfig, preferred: str | None) -> HuggingFaceType:
    """Choose the type to export as: the imported one if it still fits, else the first. Raises UserError if none fits.

    Args:
        model: resolved settings.
        preferred: model_type that the model was imported from; None if it was not imported.
    """
    types = huggingface_types()
    own = [kind for kind in types.values() if kind.architecture == model.architecture]
    ordered = sorted(own, key=lambda kind: kind.name != preferred)
    for kind in ordered:
        if kind.obstacle(model) is None:
            _check_rope(model)
            return kind
    settings = sorted({obstacle for kind in ordered if kind.is_near(model) and (obstacle := kind.obstacle(model))})
    against = f"each lacks one of {'; '.join(settings)}" if settings else f"none is of {model.architecture}"
    raise UserError(
        f"No family of Hugging Face that Threefold writes ({', '.join(types)}) has a place for this model: {against}."
    )


def _check_rope(model: ModelConfig) -> None:
    longest = model.max_position_embeddings
    if model.rope_scaling == "dynamic" and model.rope_original_positions != longest:
        raise UserError(
            f"model.rope_original_positions is {model.rope_original_positions}, and for rope_scaling dynamic a "
            f"config.json can only say {longest}, its max_position_embeddings; use linear, llama3 or yarn."
        )


def write_model(
    model: ModelConfig, kind: HuggingFaceType, dtype: str, eod: int | None, imported: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config.json of a model.

    Args:
        model: resolved settings.
        kind: type returned by `choose_type`.
        dtype: torch's name of the files' dtype.
        eod: end-of-document token; None for none.
        imported: config.json that the model was imported with; empty if it was not imported.
    """
    tokens = {key: imported.get(key) for key in _KEPT}
    if tokens["eos_token_id"] is None:
        tokens["eos_token_id"] = eod
    return {
        "architectures": [kind.head],
        "model_type": kind.name,
        **kind.write(model),
        **tokens,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def left_out(model: ModelConfig, kind: HuggingFaceType) -> tuple[str, ...]:
    """Return the training settings, with their values, for which a config.json of the type has no key."""
    return tuple(f"model.{name} {getattr(model, name):g}" for name in kind.training_only() if getattr(model, name))

"""config.json to and from the settings of a model, whatever its family."""

from collections.abc import Collection, Mapping
from typing import Any

from threefold.config import ModelConfig
from threefold.errors import UserError
from threefold.models.family import huggingface_types
from threefold.models.hf.config_json import ConfigJson, shortened
from threefold.models.hf.model_type import HuggingFaceType

_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of an imported config.json about tokens, which an export keeps."""


def read_model(
    values: Mapping[str, Any], where: str, ignored: Collection[str] = ()
) -> tuple[HuggingFaceType, dict[str, Any]]:
    """The type that a config.json names, and the settings of `model`.

    Args:
        values: what it holds.
        where: names it in sentences.
        ignored: keys to ignore.

    Raises:
        UserError: another type, or anything unsupported.
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
    """The type to export a model as: the one that it was imported from where that still fits, else the first that does.

    Args:
        model: resolved.
        preferred: model_type that it was imported from; None for none.

    Raises:
        UserError: none fits.
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
    """The config.json of a model.

    Args:
        model: resolved.
        kind: from `choose_type`.
        dtype: of the files, as torch calls it.
        eod: the token that ends a document; None for none.
        imported: the config.json that the model was imported with; empty for none.
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
    """Settings of training, with their values, that a config.json of the type has no key for."""
    return tuple(f"model.{name} {getattr(model, name):g}" for name in kind.training_only() if getattr(model, name))

"""Scaled rotary positions, in the old and the new spelling of config.json."""

from math import log
from typing import Any

from threefold.config import ModelConfig
from threefold.models.hf.config_json import ConfigJson

_FACTOR = ("rope_factor", "factor")
_ORIGINAL = ("rope_original_positions", "original_max_position_embeddings")
_METHODS: dict[str, tuple[tuple[str, str], ...]] = {
    "linear": (_FACTOR,),
    "dynamic": (_FACTOR,),
    "llama3": (
        _FACTOR,
        _ORIGINAL,
        ("rope_low_frequency_factor", "low_freq_factor"),
        ("rope_high_frequency_factor", "high_freq_factor"),
    ),
    "yarn": (
        _FACTOR,
        _ORIGINAL,
        ("rope_beta_fast", "beta_fast"),
        ("rope_beta_slow", "beta_slow"),
        ("rope_attention_factor", "attention_factor"),
    ),
}
"""Our setting and their key of each method."""
_WHOLE = "rope_original_positions"
_NUMBERS = {key for names in _METHODS.values() for _, key in names} | {"rope_theta", "mscale", "mscale_all_dim"}


def read_rope(keys: ConfigJson, positions: int) -> dict[str, Any]:
    """Settings of the rotary positions.

    The old spelling is `rope_theta` beside `rope_scaling`, the new one `rope_parameters` with both in it; transformers
    takes the old one where a file has both.

    Args:
        keys: of config.json.
        positions: longest sequence.

    Raises:
        UserError: a method or a value that Threefold does not have.
    """
    old, new = keys.take("rope_scaling") or {}, keys.take("rope_parameters") or {}
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if not isinstance(value, dict) or any(isinstance(inner, dict) for inner in value.values()):
            raise keys.refuse(key, value, "one kind of rotary positions for all layers")
    if old and new and _plain(old) != _plain(new):
        raise keys.problem(f"rope_scaling is {old} and rope_parameters {new}", "delete the one that is wrong")
    given = {key: value for key, value in (old or new).items() if value is not None}
    for key in _NUMBERS & given.keys():
        keys.checked_number(key, given[key])
    theta = given.get("rope_theta", keys.number("rope_theta"))
    settings: dict[str, Any] = {"position_embedding": "rope", "rope_theta": float(theta)}
    keys.require("partial_rotary_factor", 1.0, None)
    method = given.get("rope_type", given.get("type", "default"))
    if method == "default":
        return settings
    if not isinstance(method, str) or method not in _METHODS:
        raise keys.refuse("rope_type", method, f"default, {', '.join(_METHODS)}")
    return settings | {"rope_scaling": method} | _scaling(keys, method, given, positions)


def _scaling(keys: ConfigJson, method: str, given: dict[str, Any], positions: int) -> dict[str, Any]:
    names = dict(_METHODS[method])
    known = {*names.values(), "type", "rope_type", "rope_theta", "mscale", "mscale_all_dim", "truncate"}
    if method == "dynamic":
        known.add("original_max_position_embeddings")  # which transformers does not look at
    if given.get("partial_rotary_factor", 1.0) == 1.0:
        known.add("partial_rotary_factor")
    for key in given.keys() - known:
        raise keys.refuse(f"{key} of rope_type {method}", given[key], f"{', '.join(names.values())} for it")
    if method != "yarn":
        known_of_yarn = given.keys() & {"mscale", "mscale_all_dim", "truncate"}
        for key in known_of_yarn:
            raise keys.refuse(f"{key} of rope_type {method}", given[key], "it for yarn")
    if given.get("truncate", True) is not True:
        raise keys.refuse("truncate of rope_type yarn", given["truncate"], "bounds of whole dims alone")
    read = {ours: given[theirs] for ours, theirs in names.items() if theirs in given}
    read.setdefault("rope_factor", _default_factor(keys, method, given, positions))
    read.setdefault("rope_original_positions", positions)
    if method == "llama3" and not {"low_freq_factor", "high_freq_factor"} <= given.keys():
        raise keys.problem("low_freq_factor or high_freq_factor of rope_type llama3 is missing", "fetch the file again")
    if method == "yarn":
        read.setdefault("rope_attention_factor", _attention_factor(read["rope_factor"], given))
        read["rope_beta_fast"] = read.get("rope_beta_fast") or 32
        read["rope_beta_slow"] = read.get("rope_beta_slow") or 1
    return {name: int(value) if name == _WHOLE else float(value) for name, value in read.items()}


def _default_factor(keys: ConfigJson, method: str, given: dict[str, Any], positions: int) -> float:
    if method == "yarn" and "original_max_position_embeddings" in given:
        return positions / max(1.0, float(given["original_max_position_embeddings"]))
    if "factor" not in given:
        raise keys.problem(f"factor of rope_type {method} is missing", "fetch the file again")
    return 1.0


def _attention_factor(factor: float, given: dict[str, Any]) -> float:
    """As transformers has it where none is given."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1

    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(given["mscale"]) / scale(given["mscale_all_dim"])
    return scale(1.0)


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """The keys of config.json, in both spellings, so that old and new readers find theirs."""
    theta = model.rope_theta
    if model.rope_scaling == "none":
        return {
            "rope_theta": theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        }
    values = {theirs: getattr(model, ours) for ours, theirs in _METHODS[model.rope_scaling]}
    scaling = {"rope_type": model.rope_scaling, **values}
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {**scaling, "rope_theta": theta},
    }


def _plain(spelled: dict[str, Any]) -> dict[str, Any]:
    """Without what only one of the spellings has."""
    kept = {key: value for key, value in spelled.items() if key not in ("rope_theta", "type", "rope_type")}
    return {**kept, "rope_type": spelled.get("rope_type", spelled.get("type", "default"))}

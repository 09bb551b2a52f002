"""Reader of a config.json, key by key: a key that was not read, and might change the model, is an error."""

from collections.abc import Collection, Mapping
from math import log
from typing import Any, Final

from threefold.config import ModelConfig
from threefold.errors import UserError

MOST_LAYERS: Final = 100_000
LARGEST_SIZE: Final = 1 << 30
"""Limit of a width, a vocabulary or positions: far above any model's, and a product of two is still exact."""
_LARGEST_NUMBER: Final = 1e30

HARMLESS: Final = frozenset(
    (
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "add_cross_attention",
        "architectures",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "id2label",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "keys_to_ignore_at_inference",
        "label2id",
        "length_penalty",
        "max_length",
        "max_sequence_length",
        "min_length",
        "n_ctx",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_router_logits",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "pruned_heads",
        "remove_invalid_values",
        "reorder_and_upcast_attn",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    )
)
"""Keys that change neither logits nor loss: sampling, outputs, bookkeeping, rounding."""


def shortened(text: str) -> str:
    """Make text printable and truncate it, for an error message."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= 120 else f"{text[:119]}…"


class ConfigJson:
    """Keys of a config.json, with a record of those that have been read.

    `values` is the content of the file, `defaults` are the values of keys that it lacks, and `where` names it in
    messages.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self._values, self._defaults, self._where = values, defaults, where
        self._seen: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """Return a key's value, which may be null."""
        self._seen.add(key)
        return self._values.get(key, self._defaults.get(key, default))

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number; null means the default. Raise UserError if it is missing or not a number."""
        value = self.take(key)
        value = default if value is None else value
        if value is None:
            raise self.problem(f"{key} is missing", "take it from the model's page")
        return self.checked_number(key, value)

    def checked_number(self, key: str, value: Any) -> Any:
        """Return the value if it is a finite number, else raise UserError."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.problem(f"{key} is {shortened(repr(value))}, which is no number", "fetch the file again")
        if abs(value) > _LARGEST_NUMBER or value != value:
            raise self.problem(
                f"{key} is {shortened(str(value))}, which is no number of a model", "fetch the file again"
            )
        return value

    def whole(self, key: str, default: int | None = None, least: int = 0, most: int = LARGEST_SIZE) -> int:
        """Return an integer from `least` to `most`; null means the default. Raise UserError for anything else."""
        value = self.number(key, default)
        if value % 1 != 0:
            raise self.problem(f"{key} is {value!r}, which is no whole number", "fetch the file again")
        if not least <= value <= most:
            rule = f"at least {least}" if value < least else f"at most {most}"
            raise self.problem(f"{key} is {shortened(str(value))} but must be {rule}", "fetch the file again")
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean; null means the default. Raise UserError for anything else."""
        value = self.take(key, default)
        value = default if value is None else value
        if not isinstance(value, bool):
            shown = shortened(repr(value))
            raise self.problem(f"{key} is {shown}, which is neither true nor false", "fetch the file again")
        return value

    def listed(self, key: str, kind: type) -> list[Any] | None:
        """Return a list of values of type `kind`; None if missing or null. Raise UserError for anything else."""
        value = self.take(key)
        if value is not None and not (isinstance(value, list) and all(type(each) is kind for each in value)):
            what = {int: "whole numbers", str: "texts"}[kind]
            raise self.problem(f"{key} is {shortened(repr(value))}, which is no list of {what}", "fetch it again")
        return value

    def require(self, key: str, *allowed: Any) -> None:
        """Raise UserError if a key is present with an unsupported value."""
        value = self.take(key, allowed[0])
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
            raise self.refuse(key, value, f"{key} {' or '.join(repr(each) for each in allowed)} alone")

    def refuse(self, key: str, value: Any, can: str) -> UserError:
        """Return the error that the value of `key` is unsupported."""
        return self.problem(f"{key} is {shortened(repr(value))}", f"Threefold has {can}")

    def problem(self, what: str, remedy: str) -> UserError:
        return UserError(f"{self._where}: {what}; {remedy}.")

    def finish(self, ignored: Collection[str]) -> None:
        """Raise UserError if a key with a value was neither read, nor harmless, nor in `ignored`."""
        known = self._seen | HARMLESS | set(ignored)
        asked = {key: value for key, value in self._values.items() if key not in known and value}
        if asked:
            key = min(asked)
            raise UserError(
                f"{self._where}: {shortened(key)} is {shortened(repr(asked[key]))}, which Threefold does not know; "
                f"if it changes neither logits nor loss, give --ignore {shortened(key)}."
            )


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
"""Our setting and the key of config.json for each value of a scaling method."""
_WHOLE = "rope_original_positions"
_NUMBERS = {key for names in _METHODS.values() for _, key in names} | {"rope_theta", "mscale", "mscale_all_dim"}


def read_rope(keys: ConfigJson, positions: int) -> dict[str, Any]:
    """Read the settings of rotary positions; raise UserError if a method or a value is unsupported.

    The old spelling is `rope_theta` beside `rope_scaling`, the new one is `rope_parameters` with both. Like
    transformers, prefer the old one if a file has both. `positions` is the length of the longest sequence.
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
        known.add("original_max_position_embeddings")  # ignored by transformers
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
    """Return transformers' default attention factor of YaRN."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1

    if given.get("mscale") and given.get("mscale_all_dim"):
        return scale(given["mscale"]) / scale(given["mscale_all_dim"])
    return scale(1.0)


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json in both spellings, for old and new readers."""
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
    """Return a spelling without the keys that only one of the two has."""
    kept = {key: value for key, value in spelled.items() if key not in ("rope_theta", "type", "rope_type")}
    return {**kept, "rope_type": spelled.get("rope_type", spelled.get("type", "default"))}

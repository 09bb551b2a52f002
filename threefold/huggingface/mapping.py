"""Hugging Face's configs and weights, for all families, without torch: config.json key by key, and maps of tensors.

A key of config.json that was not read, and might change the model, is an error. A parameter is assembled from rows of
the files' tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log
from pkgutil import resolve_name
from typing import Any, Final, NamedTuple

from threefold.config import ModelConfig
from threefold.config.model import FAMILIES, longrope_attention_factor
from threefold.errors import UserError

Shapes = Mapping[str, tuple[int, ...]]  # shapes of parameters, by name
MOST_LAYERS: Final = 100_000
MOST_EXPERTS: Final = 65_536
LARGEST_SIZE: Final = 1 << 30
"""Limit of a width, a vocabulary or positions: far above any model's, and a product of two is still exact."""
_HARMLESS: Final = """
_attn_implementation_autoset _commit_hash _name_or_path add_cross_attention architectures attn_implementation
auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size
decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size
eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
gradient_checkpointing id2label is_decoder is_encoder_decoder is_llama_config keys_to_ignore_at_inference
label2id length_penalty max_length max_sequence_length min_length n_ctx no_repeat_ngram_size num_beam_groups
num_beams num_return_sequences output_attentions output_hidden_states output_past output_router_logits
output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads remove_invalid_values
reorder_and_upcast_attn repetition_penalty return_dict return_dict_in_generate sep_token_id summary_activation
summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params
temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
"""
HARMLESS: Final = frozenset(_HARMLESS.split())
"""Keys that change neither logits nor loss: sampling, outputs, bookkeeping, rounding."""


def shortened(text: str) -> str:
    """Make text printable and truncate it, for an error message."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= 120 else f"{text[:119]}…"


class Repeated(NamedTuple):
    """Parameter that a tensor of the files must equal: because of which value in config.json, and what else to do."""

    parameter: str
    because: str
    remedy: str


class ConfigJson:
    """Keys of a config.json, with a record of those that have been read; `where` names the file in messages."""

    def __init__(
        self, values: Mapping[str, Any], defaults: Mapping[str, Any], where: str, seen: set[str] | None = None
    ) -> None:
        self._values, self._defaults, self._where = values, defaults, where
        self._seen = set[str]() if seen is None else seen

    def take(self, key: str, default: Any = None) -> Any:
        """Return a key's value, which may be null."""
        self._seen.add(key)
        return self._values.get(key, self._defaults.get(key, default))

    def agreed(self, places: Mapping[str, Any]) -> Any:
        """Return the value that all places that have one give, None if none has; raise UserError if two differ."""
        given = [(place, value) for place, value in places.items() if value is not None]
        for place, value in given[1:]:
            if value != given[0][1]:
                first, second = (f"{name} is {shortened(repr(each))}" for name, each in (given[0], (place, value)))
                raise self.problem(f"{first} and {second}", "delete the one that is wrong")
        return given[0][1] if given else None

    def with_values(self, **values: Any) -> "ConfigJson":
        """Return the keys of the same file with other values of some."""
        return ConfigJson({**self._values, **values}, self._defaults, self._where, self._seen)

    def given(self, key: str) -> Any:
        """Return a key's value in the file; None if missing or null."""
        self._seen.add(key)
        return self._values.get(key)

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
            raise self.problem(f"{key} is {shortened(repr(value))}, which is not a number")
        if abs(value) > 1e30 or value != value:
            raise self.problem(f"{key} is {shortened(str(value))}, which is not a number of a model")
        return value

    def whole(self, key: str, default: int | None = None, least: int = 0, most: int = LARGEST_SIZE) -> int:
        """Return an integer from `least` to `most`; null means the default. Raise UserError for anything else."""
        value = self.number(key, default)
        if value % 1 != 0:
            raise self.problem(f"{key} is {value!r}, which is not a whole number")
        if not least <= value <= most:
            rule = f"at least {least}" if value < least else f"at most {most}"
            raise self.problem(f"{key} is {shortened(str(value))} but must be {rule}")
        return int(value)

    def checked_factors(self, key: str, value: Any) -> tuple[float, ...]:
        """Return a list of numbers above 0, else raise UserError."""
        if not isinstance(value, list) or not all(self.checked_number(key, each) > 0 for each in value):
            raise self.problem(f"{key} is {shortened(repr(value))}, which is not a list of numbers above 0")
        return tuple(map(float, value))

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean; null means the default. Raise UserError for anything else."""
        value = self.take(key, default)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.problem(f"{key} is {shortened(repr(value))}, which is neither true nor false")
        return value

    def listed(self, key: str, kind: type) -> list[Any] | None:
        """Return a list of values of type `kind`; None if missing or null. Raise UserError for anything else."""
        value = self.take(key)
        if value is not None and not (isinstance(value, list) and all(type(each) is kind for each in value)):
            what = {int: "whole numbers", str: "texts"}[kind]
            raise self.problem(f"{key} is {shortened(repr(value))}, which is not a list of {what}", "fetch it again")
        return value

    def require(self, key: str, *allowed: Any) -> None:
        """Raise UserError if a key is present with an unsupported value."""
        value = self.take(key, allowed[0])
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
            raise self.refuse(key, value, f"{key} {' or '.join(repr(each) for each in allowed)} alone")

    def refuse(self, key: str, value: Any, can: str) -> UserError:
        """Return the error that the value of `key` is unsupported."""
        return self.problem(f"{key} is {shortened(repr(value))}", f"Threefold has {can}")

    def problem(self, what: str, remedy: str = "fetch the file again") -> UserError:
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
_FACTORS: Final = (("rope_short_factors", "short_factor"), ("rope_long_factors", "long_factor"))
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
    "longrope": (
        _FACTOR,
        _ORIGINAL,
        ("rope_attention_factor", "attention_factor"),
        *_FACTORS,
    ),
}
"""Our setting and the key of config.json for each value of a scaling method."""
_NUMBERS = {key for names in _METHODS.values() for _, key in names}.difference(dict(_FACTORS).values()) | {
    "rope_theta",
    "mscale",
    "mscale_all_dim",
}


def read_rope(keys: ConfigJson, positions: int, usual_share: float | None = None) -> dict[str, Any]:
    """Read the settings of rotary positions; raise UserError if a method or a value is unsupported.

    The old spelling is `rope_theta` next to `rope_scaling`; the new one is `rope_parameters` with both. A file with
    both must say the same in each. `positions` is the length of the longest sequence, `usual_share` the share of a head
    that is rotated if the file does not say; None for a type that rotates all.
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
    inside = {"rope_theta of rope_scaling": old, "rope_theta of rope_parameters": new}
    bases = {"rope_theta": keys.given("rope_theta")} | {place: rope.get("rope_theta") for place, rope in inside.items()}
    base = keys.agreed(bases)
    theta = keys.number("rope_theta") if base is None else keys.checked_number("rope_theta", base)
    settings: dict[str, Any] = {"position_embedding": "rope", "rope_theta": float(theta)}
    key = "partial_rotary_factor"
    shares = {key: keys.take(key)} | {f"{key} of {place[14:]}": rope.get(key) for place, rope in inside.items()}
    share = keys.agreed(shares)
    if usual_share is not None:
        settings["rotary_share"] = float(keys.checked_number(key, usual_share if share is None else share))
    elif share not in (None, 1.0):
        raise keys.refuse(
            next(place for place, value in shares.items() if value is not None), share, "1.0 for this type"
        )
    method = keys.agreed({name: given.get(name) for name in ("rope_type", "type")}) or "default"
    if method == "default":
        return settings
    if method == "su":  # in older files of Phi-3
        method = "longrope"
    if not isinstance(method, str) or method not in _METHODS:
        raise keys.refuse("rope_type", method, f"default, {', '.join(_METHODS)}")
    names = dict(_METHODS[method])
    known = {*names.values(), "type", "rope_type", "rope_theta", key, "mscale", "mscale_all_dim", "truncate"}
    if method == "dynamic":
        known.add("original_max_position_embeddings")  # ignored by transformers
    for unknown in given.keys() - known:
        raise keys.refuse(f"{unknown} of rope_type {method}", given[unknown], f"{', '.join(names.values())} for it")
    if method != "yarn":
        for key in given.keys() & {"mscale", "mscale_all_dim", "truncate"}:
            raise keys.refuse(f"{key} of rope_type {method}", given[key], "it for yarn")
    if given.get("truncate", True) not in (True, False):
        raise keys.refuse("truncate of rope_type yarn", given["truncate"], "true or false")
    if method == "longrope":
        place, place_inside = _ORIGINAL[1], f"{_ORIGINAL[1]} of rope_parameters"
        original = keys.agreed({place_inside: given.get(place), place: keys.take(place)})
        given[place] = keys.checked_number(place, positions if original is None else original)
        for factors in dict(_FACTORS).values():
            given[factors] = keys.checked_factors(factors, given.get(factors))
    read = {ours: given[theirs] for ours, theirs in names.items() if theirs in given}
    if method in ("yarn", "longrope") and "original_max_position_embeddings" in given:
        growth = positions / max(1.0, float(given["original_max_position_embeddings"]))
        read.setdefault("rope_factor", growth if method == "yarn" else max(1.0, growth))
    elif "factor" not in given:
        raise keys.problem(f"factor of rope_type {method} is missing")
    read.setdefault("rope_original_positions", positions)
    if method == "llama3" and not {"low_freq_factor", "high_freq_factor"} <= given.keys():
        raise keys.problem("low_freq_factor or high_freq_factor of rope_type llama3 is missing")
    if method == "yarn":
        # The default of transformers.
        growth = log(read["rope_factor"]) if read["rope_factor"] > 1 else 0.0
        over, under = given.get("mscale"), given.get("mscale_all_dim")
        default = (0.1 * over * growth + 1) / (0.1 * under * growth + 1) if over and under else 0.1 * growth + 1
        read.setdefault("rope_attention_factor", default)
        read["rope_beta_fast"] = read.get("rope_beta_fast") or 32
        read["rope_beta_slow"] = read.get("rope_beta_slow") or 1
    if method == "longrope" and "rope_attention_factor" not in read:
        read["rope_attention_factor"] = longrope_attention_factor(read["rope_factor"], read["rope_original_positions"])
    values = {name: value if type(value) is tuple else float(value) for name, value in read.items()}
    values["rope_original_positions"] = int(read["rope_original_positions"])
    if not given.get("truncate", True):
        values["rope_truncate"] = False
    return settings | {"rope_scaling": method} | values


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json in both spellings, for old and new readers."""
    theta, method = model.rope_theta, model.rope_scaling
    if method == "none":
        scaling, parameters = None, {"rope_type": "default", "rope_theta": theta}
    else:
        values = {theirs: getattr(model, ours) for ours, theirs in _METHODS[method]}
        scaling = {"rope_type": method, **{k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}}
        if not model.rope_truncate:
            scaling["truncate"] = False
        parameters = {**scaling, "rope_theta": theta}
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": parameters}


FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
"""Kinds of attention in `layer_types`."""


def read_rope_by_kind(keys: ConfigJson, positions: int, sliding_theta: float) -> dict[str, Any]:
    """Read the settings of rotary positions that differ between full and sliding layers, which have no scaling.

    The old spelling has the keys of full layers and `rope_local_base_freq`, by default `sliding_theta`.
    """
    nested, local = keys.take("rope_parameters") or {}, keys.given("rope_local_base_freq")
    for key in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
        keys.take(key)
    if not isinstance(nested, dict) or not nested.keys() <= {FULL, SLIDING}:
        raise keys.refuse("rope_parameters", nested, f"{FULL} and {SLIDING} in it for this type")
    full, sliding = (nested.get(kind) or {} for kind in (FULL, SLIDING))
    if not isinstance(sliding, dict) or not isinstance(full, dict):
        raise keys.refuse("rope_parameters", nested, f"objects at {FULL} and {SLIDING} for this type")
    if sliding.keys() - {"rope_type", "rope_theta"} or sliding.get("rope_type", "default") != "default":
        raise keys.refuse(f"{SLIDING} of rope_parameters", sliding, "rope_type default alone for sliding layers")
    bases = {"rope_local_base_freq": local, f"rope_theta of {SLIDING}": sliding.get("rope_theta")}
    base = keys.agreed(bases)
    theta = keys.checked_number("rope_local_base_freq", sliding_theta if base is None else base)
    settings = read_rope(keys.with_values(rope_parameters=full), positions)
    return settings | {"sliding_rope_theta": float(theta), "sliding_rope_scaling": False}


def write_rope_by_kind(model: Any) -> dict[str, Any]:
    """Return the keys of config.json for full and sliding layers, in both spellings."""
    written = write_rope(model)
    theta = model.sliding_rope_theta if model.sliding_window else model.rope_theta
    kinds = {FULL: written["rope_parameters"], SLIDING: {"rope_type": "default", "rope_theta": theta}}
    return {**written, "rope_local_base_freq": theta, "rope_parameters": kinds}


def pattern_of(kinds: Sequence[str]) -> str | list[str]:
    """Return `layer_types` as a pattern of attention, as a period where it is some sliding layers and a full one."""
    names = [kind.removesuffix("_attention") for kind in kinds]
    period = names.index("full") + 1 if "full" in names else 0
    repeated = ["full" if period and layer % period == period - 1 else "sliding" for layer in range(len(names))]
    return f"{period - 1} sliding : 1 full" if period > 1 and names == repeated else names


def _plain(spelled: dict[str, Any]) -> dict[str, Any]:
    apart = ("rope_theta", "partial_rotary_factor", "type", "rope_type")  # which may stand in one of several places
    kept = {key: value for key, value in spelled.items() if key not in apart}
    return {**kept, "rope_type": spelled.get("rope_type", spelled.get("type", "default"))}


@dataclass(frozen=True)
class SourceRows:
    """Some `rows` of a tensor for each group of a parameter's rows, from row `start`, of matrix `index` of a stack."""

    name: str
    rows: int = 1
    start: int = 0
    index: int | None = None


@dataclass(frozen=True)
class WeightMap:
    """Map from tensors in the files to a parameter, or to one expert's matrix of a stacked parameter.

    The rows of the parameter form groups, each with some rows of every source in order.
    """

    name: str
    shape: tuple[int, ...]  # of one matrix of a stack
    sources: tuple[SourceRows, ...]
    transposed: bool = False  # whether the files hold [in, out], or [experts, in, out] for a whole stack
    order: tuple[int, ...] = ()  # row of a group in the files for each of the parameter's, if their order differs
    expert: int | None = None  # index in the stack

    @property
    def group(self) -> int:
        """Number of rows in a group."""
        return sum(source.rows for source in self.sources)

    def source_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor in the files, by name; for a stack, without the dim of the stack."""
        groups, rest = self.shape[0] // self.group, self.shape[1:]
        rows: dict[str, int] = {}
        for source in self.sources:
            rows[source.name] = rows.get(source.name, 0) + source.rows * groups
        shapes = {name: (count, *rest) for name, count in rows.items()}
        return {name: (*shape[:-2], *shape[-1:-3:-1]) for name, shape in shapes.items()} if self.transposed else shapes


def copied(name: str, source: str, shapes: Shapes) -> WeightMap:
    """Map a parameter that the files hold unchanged."""
    return WeightMap(name, shapes[name], (SourceRows(source),))


def interleaved(name: str, shape: Sequence[int], sources: Sequence[SourceRows], expert: int | None = None) -> WeightMap:
    """Map a parameter whose groups of rows alternate between several tensors."""
    return WeightMap(name, tuple(shape), tuple(sources), expert=expert)


def halves(pairs: int, before: int = 0) -> tuple[int, ...]:
    """Return the order of rows that turns interleaved rotary pairs, after `before` rows, into two halves (`Rotary`)."""
    return (*range(before), *range(before, before + 2 * pairs, 2), *range(before + 1, before + 2 * pairs, 2))


@dataclass(frozen=True)
class TensorNames:
    """Names of the tensors that are copied unchanged: parameter, outside or by its name within a block → tensor."""

    outside: Mapping[str, str]
    in_block: Mapping[str, str]
    block: str  # prefix of the names of a block's tensors; `{}` stands for its number

    def with_others(self, in_block: Mapping[str, str]) -> "TensorNames":
        """Return these names, with other or further ones within a block."""
        return replace(self, in_block={**self.in_block, **in_block})


@dataclass(frozen=True)
class HuggingFaceType(ABC):
    """A `model_type` of Hugging Face: its config.json and the names of its tensors."""

    name: str
    architecture: str
    head: str  # class of transformers with a language-model head
    names: TensorNames
    prefix: str = "model."  # of all tensor names except the head's
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that a config.json lacks, as in transformers

    @abstractmethod
    def read(self, given: ConfigJson) -> dict[str, Any]:
        """Return the settings of `model`, except the architecture; raise UserError for an unsupported value."""

    def settled(
        self, settings: dict[str, Any], tensors: Collection[str], ignored: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return the settings of `read` given the names of the files' tensors and the keys that the user ignores."""
        return settings

    @abstractmethod
    def write(self, model: Any) -> dict[str, Any]:
        """Return the keys of config.json for a resolved model without an `obstacle`, except model_type and tokens."""

    def obstacle(self, model: Any) -> str | None:
        """Return the first setting of a model, with its value, that this type has no key for; None if there is none."""
        return None

    def is_near(self, model: Any) -> bool:
        """Return whether an error about a model that fits no type should name this type's obstacle."""
        return True

    def training_only(self) -> Sequence[str]:
        """Return the settings of `model` that only matter in training and have no key in config.json."""
        return ()

    def rearranged(
        self, name: str, in_block: str, block: str, model: Any, shapes: Shapes, present: Collection[str]
    ) -> list[WeightMap]:
        """Map a parameter of a block that the files do not hold unchanged; `present` is empty when writing."""
        raise ValueError(f"{type(self).__name__} has no tensor for {name}")

    def leaves_out(self, tensor: str, model: Any, values: Mapping[str, Any]) -> bool:
        """Return whether a tensor is of a part that models here do not have; `values` are those of config.json."""
        return False

    def repeated(self, model: Any) -> dict[str, Repeated]:
        """Return the parameter that each tensor repeats which files may have besides those of the parameters."""
        tied = Repeated(
            "embed.tokens.weight",
            "tie_word_embeddings true",
            "set it to false if the model has a head of its own",
        )
        return {"lm_head.weight": tied} if model.tie_embeddings else {}

    def weights(self, model: ModelConfig, shapes: Shapes, present: Collection[str] = ()) -> list[WeightMap]:
        """Map every parameter, in the order of the layers; experts are stored one by one if `present` is empty."""
        maps: list[WeightMap] = []
        for name in shapes:
            if name in self.names.outside:
                maps.append(copied(name, self.names.outside[name], shapes))
                continue
            _, layer, in_block = name.split(".", 2)
            maps += self.of_block(name, in_block, self.names.block.format(layer), model, shapes, present)
        return maps

    def of_block(
        self, name: str, in_block: str, block: str, model: Any, shapes: Shapes, present: Collection[str]
    ) -> list[WeightMap]:
        """Map a parameter of the block whose tensors have the prefix `block`."""
        if in_block in self.names.in_block:
            return [copied(name, block + self.names.in_block[in_block], shapes)]
        return self.rearranged(name, in_block, block, model, shapes, present)


def huggingface_types() -> dict[str, HuggingFaceType]:
    """Return the types that can be imported and exported, of all families, by Hugging Face's `model_type`."""
    families = [FAMILIES.load(name) for name in FAMILIES.names()]
    types = (resolve_name(family.huggingface) for family in families if family.huggingface)
    return {kind.name: kind for kinds in types for kind in kinds}

"""Reading a config.json key by key: a key that was not read, and that might change the model, is an error."""

from collections.abc import Collection, Mapping
from typing import Any, Final

from threefold.errors import UserError

MOST_LAYERS: Final = 100_000
LARGEST_SIZE: Final = 1 << 30
"""Of a width, a vocabulary, positions: far above those of any model, and a product of two is still a whole number."""
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
"""Keys that change neither logits nor loss: how text is chosen, what is returned, bookkeeping, rounding."""


def shortened(text: str) -> str:
    """Text as an error shows it: printable, and truncated where it is long."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= 120 else f"{text[:119]}…"


class ConfigJson:
    """The keys of a config.json, and which of them have been read.

    Args:
        values: what it holds.
        defaults: of keys that it lacks.
        where: names it in sentences.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self._values, self._defaults, self._where = values, defaults, where
        self._seen: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """A key's value; null is a value where the file says so."""
        self._seen.add(key)
        return self._values.get(key, self._defaults.get(key, default))

    def number(self, key: str, default: float | None = None) -> Any:
        """A number.

        Raises:
            UserError: it is missing, or something else.
        """
        value = self.take(key)
        value = default if value is None else value
        if value is None:
            raise self.problem(f"{key} is missing", "take it from the model's page")
        return self.checked_number(key, value)

    def checked_number(self, key: str, value: Any) -> Any:
        """A value that is a number.

        Raises:
            UserError: it is something else, or not finite.
        """
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.problem(f"{key} is {shortened(repr(value))}, which is no number", "fetch the file again")
        if abs(value) > _LARGEST_NUMBER or value != value:
            raise self.problem(
                f"{key} is {shortened(str(value))}, which is no number of a model", "fetch the file again"
            )
        return value

    def whole(self, key: str, default: int | None = None, least: int = 0, most: int = LARGEST_SIZE) -> int:
        """A whole number.

        Args:
            key: of config.json.
            default: where it is missing.
            least: the smallest that it can be.
            most: the largest.

        Raises:
            UserError: it is missing, or something else.
        """
        value = self.number(key, default)
        if value % 1 != 0:
            raise self.problem(f"{key} is {value!r}, which is no whole number", "fetch the file again")
        if not least <= value <= most:
            rule = f"at least {least}" if value < least else f"at most {most}"
            raise self.problem(f"{key} is {shortened(str(value))} but must be {rule}", "fetch the file again")
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; null is the default.

        Raises:
            UserError: it is something else.
        """
        value = self.take(key, default)
        value = default if value is None else value
        if not isinstance(value, bool):
            shown = shortened(repr(value))
            raise self.problem(f"{key} is {shown}, which is neither true nor false", "fetch the file again")
        return value

    def listed(self, key: str, kind: type) -> list[Any] | None:
        """A list of values of a kind; None where it is missing or null.

        Raises:
            UserError: it is something else.
        """
        value = self.take(key)
        if value is not None and not (isinstance(value, list) and all(type(each) is kind for each in value)):
            what = {int: "whole numbers", str: "texts"}[kind]
            raise self.problem(f"{key} is {shortened(repr(value))}, which is no list of {what}", "fetch it again")
        return value

    def require(self, key: str, *allowed: Any) -> None:
        """Check that a key, where it is given, has one of the values that Threefold can do.

        Raises:
            UserError: it has another.
        """
        value = self.take(key, allowed[0])
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
            raise self.refuse(key, value, f"{key} {' or '.join(repr(each) for each in allowed)} alone")

    def refuse(self, key: str, value: Any, can: str) -> UserError:
        """The error that the value of `key` is unsupported."""
        return self.problem(f"{key} is {shortened(repr(value))}", f"Threefold has {can}")

    def problem(self, what: str, remedy: str) -> UserError:
        return UserError(f"{self._where}: {what}; {remedy}.")

    def finish(self, ignored: Collection[str]) -> None:
        """Check that every key with a value was read.

        Args:
            ignored: keys to ignore.

        Raises:
            UserError: a key is not known.
        """
        known = self._seen | HARMLESS | set(ignored)
        asked = {key: value for key, value in self._values.items() if key not in known and value}
        if asked:
            key = min(asked)
            raise UserError(
                f"{self._where}: {shortened(key)} is {shortened(repr(asked[key]))}, which Threefold does not know; "
                f"if it changes neither logits nor loss, give --ignore {shortened(key)}."
            )

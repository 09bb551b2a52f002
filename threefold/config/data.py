"""The `data` section of a config."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from threefold.config.by_step import ByStep, WeightByStep
from threefold.config.section import MOST_TOKENS, PathText, Section, Text, derived
from threefold.constants import MOST_IDS
from threefold.doors import hook


def _step_ranges(given: Any) -> Any:
    entries = given if isinstance(given, list | tuple) else (given,)
    return ranges.parse(entries).written if (ranges := hook("step_ranges")) else tuple(entries)


def _weights(given: Any) -> Any:
    """Return weights as text, also of a number or a list, as which YAML reads `1` and `[949, 50, 1]`."""
    parts = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(part, int | float) and not isinstance(part, bool) for part in parts):
        return given
    return ",".join(map(str, parts))


class DataConfig(Section):
    """Training data of a run: its files, tokenizer and samples."""

    path: PathText = derived(min_length=1)
    """Folder written by `threefold data prepare`; or token files of Megatron-LM (`PREFIX.bin`, `PREFIX.idx`) or Fleet
    (`PREFIX_ids.npy`, `PREFIX_idx.npz`; `PREFIX_ids.npz`), given as their folder, their prefix or one of the files; or
    a JSON Lines file (`.jsonl`, `.json`, also as `.gz` or `.zst`) with a text or a conversation on each line; or the
    import path, `package.module:Name` or `my_data.py:make`, of a map-style `torch.utils.data.Dataset` of tokens or of a
    function that returns one (docs/training.md; for a model of your own, samples may be any nesting of tensors).
    Default: must be given, or `mixture`."""
    mixture: dict[PathText, Annotated[float, Field(gt=0), ByStep(WeightByStep)]] = derived(min_length=1)
    """Several corpora instead of `path`: maps the path of each to its weight. Only the ratios of the weights matter,
    such as `{books: 3, code: 1}`. A weight may change by step, as in `{books: 3, code: {0: 0, 1000: 1}}`. All corpora
    must have the same tokenizer. Default: none."""
    validation: PathText = derived(min_length=1)
    """Validation data, as for `path`: token files, or a JSON Lines file, which is encoded like the training data. Then
    `split` is 1 unless it is given: all of `path` is for training. Default: none, documents that `split` holds out."""
    tokenizer: PathText = derived(min_length=1)
    """The `tokenizer.json` for JSON Lines, and for token files of other systems, which do not include one; without it,
    such token files need `model.vocab_size`. Default: none."""
    eod: int = derived(ge=0, le=MOST_IDS)
    """Id of the end-of-document token: nothing is predicted after it in token files of other systems, and it is
    appended to each JSON line. Default: the tokenizer's, if documents end with it; otherwise none, and the first token
    of a document is never predicted."""
    key: Text = Field(default="text", min_length=1)
    """Key of a JSON line that holds its text or messages. Fallback: `messages`, then `prompt` with `completion`."""
    special_tokens: Literal["parse", "text"] = derived()
    """How text that spells a special token, such as `<|im_start|>`, is encoded: `parse` as that token, as in
    `transformers`; `text` as plain text, for untrusted sources. Default: `parse`; token files keep their choice."""
    chat_template: PathText = derived(min_length=1)
    """File with the chat template for conversations in JSON Lines: a `.jinja` file or a `tokenizer_config.json`.
    Default: the one in the folder of `tokenizer`."""
    loss_tokens: Literal["answers", "all"] = "answers"
    """Tokens with labels in conversations and prompts with completions: `answers` (assistant, completion) or `all`."""
    cache: PathText = derived(min_length=1)
    """Folder that caches the tokens of JSON Lines, so that they are encoded only once. Default: `FILE.cache` beside the
    file or, if that is not writable, `~/.cache/threefold` (under `XDG_CACHE_HOME` if it is set)."""
    sequence_length: Annotated[int, Field(ge=1, le=MOST_TOKENS), ByStep()] = derived()
    """Tokens in a sample. By step, such as `{0: 1024, 5000: 4096}`, each value divides the largest (docs/training.md).
    Default: `model.max_position_embeddings` when that is given, else 256."""
    split: Annotated[str, BeforeValidator(_weights)] = "949,50,1"
    """Weights for splitting documents into training, validation and test parts; an omitted weight is 0. Also a list,
    such as `[949, 50, 1]`, or a number."""
    separate_documents: bool = False
    """Whether attention is limited to tokens of the same document in samples that pack several. Default: false; true
    for conversations and for prompts with completions."""
    skip_steps: Annotated[tuple[int | str, ...], BeforeValidator(_step_ranges)] = derived(
        strict=False, examples=["[120, 300-320]"]
    )
    """Steps of the run to skip on purpose, counted from 1: a list of steps and inclusive ranges, such as
    `[120, 300-320]`. A skipped step reads no samples and makes no update, but the step counter advances, so the
    learning rate and the samples of all other steps stay the same. Default: none."""

    @model_validator(mode="before")
    @classmethod
    def _train_on_all(cls, given: Any) -> Any:
        """Hold out no training data, unless told to, if there are validation data."""
        if isinstance(given, dict) and given.get("validation") and given.get("split") is None:
            return given | {"split": "1"}
        return given

    @model_validator(mode="after")
    def _check_one_is_given(self) -> Self:
        if self.path is None and self.mixture is None:
            raise PydanticCustomError("missing", "path or mixture is missing")
        if self.path is not None and self.mixture is not None:
            raise PydanticCustomError("given_twice", "path and mixture are given")
        return self

    @property
    def corpora(self) -> dict[str, float]:
        """Weight of each corpus, by path."""
        return {self.path: 1.0} if self.mixture is None else self.mixture

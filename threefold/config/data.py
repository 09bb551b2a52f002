"""The `data` section of a config, and ranges of steps."""

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from threefold.config.section import MOST_STEPS, MOST_TOKENS, PathText, Section, Text, derived
from threefold.constants import MOST_IDS

_RANGE = re.compile(r"(\d{1,15}) ?- ?(\d{1,15})|(\d{1,15})")
_WRITTEN = "a list of steps and ranges of steps from 1 on, such as [120, 300-320]"


@dataclass(frozen=True)
class StepRanges:
    """Set of steps, counted from 1; `ranges` are (first, last), ascending, disjoint and not adjacent."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> "StepRanges":
        """Return the union of ranges given in any order, overlapping or not."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = joined[-1][0], max(last, joined[-1][1])
            else:
                joined.append((first, last))
        return cls(tuple(joined))

    @classmethod
    def parse(cls, given: Any) -> "StepRanges":
        """Parse a whole number, a range as text, or a list of these; raise ValueError with the accepted forms."""
        entries = given if isinstance(given, list | tuple) else [given]
        return cls.of(_parsed(entry) for entry in entries)

    @property
    def written(self) -> tuple[int | str, ...]:
        """Steps and ranges as they are written in a config, such as `(120, "300-320")`."""
        return tuple(first if first == last else f"{first}-{last}" for first, last in self.ranges)

    def __contains__(self, step: int) -> bool:
        return self.around(step) is not None

    def __str__(self) -> str:
        return ", ".join(str(entry) for entry in self.written)

    def around(self, step: int) -> tuple[int, int] | None:
        """Return the range that contains a step, or None."""
        place = bisect_right(self.ranges, (step, MOST_STEPS + 1)) - 1
        return self.ranges[place] if place >= 0 and step <= self.ranges[place][1] else None

    def next_outside(self, step: int) -> int:
        """Return the first step from `step` on that is in no range."""
        found = self.around(step)
        return step if found is None else found[1] + 1

    def with_range(self, first: int, last: int) -> "StepRanges":
        return StepRanges.of([*self.ranges, (first, last)])


def _parsed(entry: Any) -> tuple[int, int]:
    match = _RANGE.fullmatch(str(entry).strip()) if type(entry) in (int, str) else None
    if match is None:
        raise ValueError(_WRITTEN)
    first, last = (int(match[3]),) * 2 if match[3] else (int(match[1]), int(match[2]))
    if last < first:
        raise ValueError(f"{_WRITTEN}, and {first}-{last} ends before it begins; use {last}-{first}")
    if not 1 <= first <= last <= MOST_STEPS:
        raise ValueError(_WRITTEN)
    return first, last


def _step_ranges(given: Any) -> Any:
    try:
        return StepRanges.parse(given).written
    except ValueError as error:
        raise PydanticCustomError("step_ranges", "{rule}", {"rule": str(error)}) from None


SkippedSteps = Annotated[tuple[int | str, ...], BeforeValidator(_step_ranges)]
"""Steps and ranges of steps, such as `[120, 300-320]`, in order and without overlap."""


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
    mixture: dict[PathText, Annotated[float, Field(gt=0)]] = derived(min_length=1)
    """Several corpora instead of `path`: maps the path of each to its weight. Only the ratios of the weights matter,
    such as `{books: 3, code: 1}`. All corpora must have the same tokenizer. Default: none."""
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
    sequence_length: int = derived(ge=1, le=MOST_TOKENS)
    """Tokens in a sample. Default: `model.max_position_embeddings` when that is given, else 256."""
    split: Annotated[str, BeforeValidator(_weights)] = "949,50,1"
    """Weights for splitting documents into training, validation and test parts; an omitted weight is 0. Also a list,
    such as `[949, 50, 1]`, or a number."""
    separate_documents: bool = False
    """Whether attention is limited to tokens of the same document in samples that pack several. Default: false; true
    for conversations and for prompts with completions."""
    skip_steps: SkippedSteps = derived(strict=False, examples=["[120, 300-320]"])
    """Steps of the run to skip on purpose, counted from 1: a list of steps and inclusive ranges, such as
    `[120, 300-320]`. A skipped step reads no samples and makes no update, but the step counter advances, so the
    learning rate and the samples of all other steps stay the same. Default: none."""

    @model_validator(mode="after")
    def _check_one_is_given(self) -> Self:
        if self.path is None and self.mixture is None:
            raise PydanticCustomError("missing", "path or mixture is missing")
        if self.path is not None and self.mixture is not None:
            raise PydanticCustomError("given_twice", "path and mixture are given")
        return self

    @property
    def skipped(self) -> StepRanges:
        """Steps of `skip_steps` as ranges."""
        return StepRanges.parse(self.skip_steps or ())

    @property
    def corpora(self) -> dict[str, float]:
        """Weight of each corpus, by path."""
        return {self.path: 1.0} if self.mixture is None else self.mixture

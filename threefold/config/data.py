"""The `data` section of a config, and the ranges of steps that it may have."""

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from threefold.config.section import MOST_IDS, MOST_STEPS, MOST_TOKENS, PathText, Section, derived

_RANGE = re.compile(r"(\d{1,15}) ?- ?(\d{1,15})|(\d{1,15})")
_WRITTEN = "a list of steps and ranges of steps from 1 on, such as [120, 300-320]"


@dataclass(frozen=True)
class StepRanges:
    """A set of steps, 1 being the first.

    Attributes:
        ranges: first and last step of each, in order, none touching another.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> "StepRanges":
        """The union of ranges, of which each may be in any place."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = joined[-1][0], max(last, joined[-1][1])
            else:
                joined.append((first, last))
        return cls(tuple(joined))

    @classmethod
    def parse(cls, given: Any) -> "StepRanges":
        """The steps of a setting: a list of whole numbers and of ranges as text, or one of either.

        Raises:
            ValueError: what it must be instead, as the end of a sentence.
        """
        entries = given if isinstance(given, list | tuple) else [given]
        return cls.of(_parsed(entry) for entry in entries)

    @property
    def written(self) -> tuple[int | str, ...]:
        """As the setting is written."""
        return tuple(first if first == last else f"{first}-{last}" for first, last in self.ranges)

    def __contains__(self, step: int) -> bool:
        return self.around(step) is not None

    def __str__(self) -> str:
        return ", ".join(str(entry) for entry in self.written)

    def around(self, step: int) -> tuple[int, int] | None:
        """The range that a step is in; None where it is in none."""
        place = bisect_right(self.ranges, (step, MOST_STEPS + 1)) - 1
        return self.ranges[place] if place >= 0 and step <= self.ranges[place][1] else None

    def next_outside(self, step: int) -> int:
        """The first step from `step` on that is in no range."""
        found = self.around(step)
        return step if found is None else found[1] + 1

    def with_range(self, first: int, last: int) -> "StepRanges":
        """The same with a further range."""
        return StepRanges.of([*self.ranges, (first, last)])


def _parsed(entry: Any) -> tuple[int, int]:
    if type(entry) not in (int, str):
        raise ValueError(_WRITTEN)
    match = _RANGE.fullmatch(str(entry).strip())
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


class DataConfig(Section):
    """The data of a run."""

    path: PathText = derived(min_length=1)
    """Folder that `threefold data prepare` wrote, or token files of Megatron-LM (`PREFIX.bin`, `PREFIX.idx`) or Fleet
    (`PREFIX_ids.npy`, `PREFIX_idx.npz`; `PREFIX_ids.npz`): their folder, their prefix or one of them; or a file of JSON
    lines (`.jsonl`, `.json`, also as `.gz` or `.zst`), each of them a sample or a conversation; or the import path of a
    map-style `torch.utils.data.Dataset` of tokens, or for a model of your own of any nesting of tensors, or of a
    function that makes one, `package.module:Name` or `my_data.py:make` (docs/training.md). Default: must be given, or
    `mixture`."""
    mixture: dict[PathText, Annotated[float, Field(gt=0)]] = derived(min_length=1)
    """Several corpora in place of `path`: the path of each and its share of the samples, of which only the ratios
    count, such as `{books: 3, code: 1}`; they must have one tokenizer. Default: none."""
    tokenizer: PathText = derived(min_length=1)
    """The `tokenizer.json` of JSON lines, and of token files of other systems, which have none of their own; without it
    these need `model.vocab_size`. Default: none."""
    eod: int = derived(ge=0, le=MOST_IDS)
    """Id of the token that ends a document in token files of other systems, after which nothing is predicted, and that
    is put after each JSON line. Default: that of the tokenizer, if documents end with it; else none, and no document's
    first token is predicted."""
    key: str = Field(default="text", min_length=1)
    """Which key of a JSON line has its text, or a list of messages. Where no line has it, `messages` is looked for, and
    then `prompt` and `completion`."""
    special_tokens: Literal["parse", "text"] = derived()
    """What becomes of text that spells a special token, such as `<|im_start|>`: `parse` makes it that token, as
    `transformers` does; `text` keeps it as text, for untrusted sources. Default: `parse`; token files were
    made with one or the other, which holds for them."""
    chat_template: PathText = derived(min_length=1)
    """File with the chat template of conversations in JSON lines: `.jinja`, or a `tokenizer_config.json`. Default: the
    one in the folder of `tokenizer`."""
    loss_tokens: Literal["answers", "all"] = "answers"
    """Which tokens of conversations and of prompts with completions have labels: `answers`, those of the assistant's
    turns and the completions, or `all`."""
    cache: PathText = derived(min_length=1)
    """Folder for the tokens of JSON lines, which are encoded once. Default: `FILE.cache` beside the file, or
    `~/.cache/threefold` (under `XDG_CACHE_HOME` where that is set) where that cannot be written."""
    sequence_length: int = derived(ge=1, le=MOST_TOKENS)
    """Tokens in a sample. Default: `model.max_position_embeddings` when that is given, else 256."""
    split: str = "949,50,1"
    """Weights of the training, validation and test parts, over documents; a part that is left out has 0."""
    separate_documents: bool = False
    """Whether attention stops at the bounds of the documents packed into a sample. Default: false; true where the data
    is conversations, or prompts with completions."""
    skip_steps: SkippedSteps = derived(strict=False, examples=["[120, 300-320]"])
    """Steps of the run, 1 being the first, that are skipped on purpose: a list of steps and of ranges with both ends,
    such as `[120, 300-320]`. Their samples are not read and no update is made; the step counter, and with it the
    learning rate and the samples of every other step, goes on as if they had been made. Default: none."""

    @model_validator(mode="after")
    def _check_one_is_given(self) -> Self:
        if self.path is None and self.mixture is None:
            raise PydanticCustomError("missing", "path or mixture is missing")
        if self.path is not None and self.mixture is not None:
            raise PydanticCustomError("given_twice", "path and mixture are given")
        return self

    @property
    def skipped(self) -> StepRanges:
        """The steps of `skip_steps`."""
        return StepRanges.parse(self.skip_steps or ())

    @property
    def corpora(self) -> dict[str, float]:
        """The path of each corpus and its weight."""
        return {self.path: 1.0} if self.mixture is None else self.mixture

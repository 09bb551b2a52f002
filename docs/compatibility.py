"""Page of the features that can be combined, from the features and a config's checks (`docs/generate.py`)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, NamedTuple

from threefold.config.rules import RULES, Rule
from threefold.errors import UserError
from threefold.planner.reference import FEATURES, Feature, Settings, config_with

_INTRODUCTION = """\
# Compatibility of features

**Any two of these {features} features can be combined, except for the pairs in the first table.** The results equal
those of one process up to rounding: the test suite runs each of the {pairs} pairs. A combination that does not work is
refused before any worker starts, with the reason given in the table. Two values of one setting (two schedules, two
stages of ZeRO) exclude each other. To check your own combination, run

    threefold config compatibility zero3 zbv         # whether these features can be combined, or why not
    threefold config compatibility compile           # the features that one cannot be combined with
"""


@dataclass(frozen=True)
class Cell:
    """Pair of features; `reason` says why they cannot be combined, and is empty if they can."""

    first: Feature
    second: Feature
    reason: str = ""

    @property
    def works(self) -> bool:
        return not self.reason

    @property
    def rule(self) -> Rule | None:
        """Rule that names both features, or their kinds or needs; None if there is none."""
        pair = (self.first.names, self.second.names)
        for rule in RULES:
            if any(rule.first in one and rule.second in other for one, other in (pair, pair[::-1])):
                return rule
        return None


def cells() -> Iterator[Cell]:
    """Yield every pair of features that are not values of one setting."""
    for first, second in combinations(FEATURES, 2):
        if first.excludes(second):
            continue
        try:
            config_with((first, second))
            yield Cell(first, second)
        except UserError as error:
            yield Cell(first, second, str(error))


class Refusal(NamedTuple):
    """Features that cannot be combined with others (no `first` with any `second`), why, and what to use instead."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    why: str
    instead: str


class Condition(NamedTuple):
    """Condition under which two features can be combined.

    Attributes:
        rule: the condition in words.
        broken: settings that break the condition, added to those of the two features.
    """

    first: str
    second: str
    rule: str
    broken: Settings


CONDITIONS: Final = (
    Condition(
        "tp",
        "llama",
        "`tp` divides the attention heads, and either divides the key-value heads or is a multiple of their number",
        {"model.num_attention_heads": 12, "model.num_key_value_heads": 3, "model.hidden_size": 24},
    ),
    Condition(
        "tp",
        "zero1",
        "every rank has rows of the vocabulary; applies to each ZeRO stage",
        {"parallel.tp": 4, "model.vocab_size": 5},
    ),
    Condition(
        "cp", "sp", "`data.sequence_length` is divisible by `cp · tp` and by `2 · cp`", {"data.sequence_length": 6}
    ),
    Condition(
        "hybrid",
        "ep",
        "`zero_shards` is a multiple or a divisor of `ep`",
        {"parallel.dp": 6, "parallel.zero_shards": 3, "train.global_batch_size": 12},
    ),
    Condition(
        "zero1",
        "ep",
        "the number of ranks that share the same experts divides `model.hidden_size`; applies to each ZeRO stage",
        {"parallel.dp": 6, "train.global_batch_size": 12},
    ),
    Condition(
        "interleaved",
        "accumulation",
        "micro-batches in equal rounds of `pp` or more; applies to `zero-bubble` too",
        {"train.gradient_accumulation_steps": 5, "train.global_batch_size": 20},
    ),
    Condition(
        "dualpipev",
        "accumulation",
        "at least two micro-batches per pipeline rank",
        {"train.gradient_accumulation_steps": 2},
    ),
    Condition(
        "fp8",
        "zero-bubble",
        "no `train.compile`; applies to each schedule that defers weight gradients",
        {"train.compile": True},
    ),
)
"""Pairs with a condition; a config that breaks it is refused with the nearest value that works."""


def refusals(pairs: Iterable[Cell]) -> list[Refusal]:
    """Return all refused combinations, one entry per reason."""
    by_rule: dict[Rule, list[Cell]] = {}
    for cell in pairs:
        if cell.rule is not None:
            by_rule.setdefault(cell.rule, []).append(cell)
    found: dict[tuple[str, str], Refusal] = {}
    for rule, refused in by_rule.items():
        sides: tuple[dict[str, None], dict[str, None]] = ({}, {})
        for cell in refused:
            ordered = (cell.first, cell.second) if rule.first in cell.first.names else (cell.second, cell.first)
            for side, feature in zip(sides, ordered, strict=True):
                side[feature.name] = None
        why, _, instead = refused[0].reason.partition(" but ")[2].removesuffix(".").rpartition("; use ")
        found[rule.first, rule.second] = Refusal(tuple(sides[0]), tuple(sides[1]), why, f"`{rule.key}` {instead}")
    return list(found.values())


def markdown() -> str:
    """Return the page: refused combinations with alternatives, conditions, and features by group."""
    pairs = list(cells())
    refused = refusals(pairs)
    lines = [_INTRODUCTION.format(features=len(FEATURES), pairs=sum(cell.works for cell in pairs))]
    lines += ["## What cannot be combined", "", "| Feature | Not with | Reason | Alternative |", "|---|---|---|---|"]
    lines += [f"| {_bold(each.first)} | {_bold(each.second)} | {each.why} | {each.instead} |" for each in refused]
    lines += ["", "## What can be combined under a condition", "", "| Feature | With | Condition |", "|---|---|---|"]
    lines += [f"| **{each.first}** | **{each.second}** | {each.rule} |" for each in CONDITIONS]
    lines += ["", "## The features"]
    for group, features in _grouped().items():
        lines += ["", f"### {group}", "", "| Name | Feature | Switched on by | Not with |", "|---|---|---|---|"]
        for feature in features:
            others = ", ".join(_partners(feature, refused)) or "–"
            lines.append(f"| **{feature.name}** | {feature.title} | {switches(feature)} | {others} |")
    return "\n".join(lines) + "\n"


def switches(feature: Feature) -> str:
    """Format the settings that switch a feature on, and those that it needs, as Markdown."""
    given = ", ".join(f"`{key}: {_yaml(value)}`" for key, value in feature.settings.items())
    needs = ", ".join(
        f"`{key}` {_yaml(value)}" + (" or more" if type(value) is int else "") for key, value in feature.needs.items()
    )
    return f"{given}; needs {needs}" if needs else given


def _grouped() -> dict[str, list[Feature]]:
    groups: dict[str, list[Feature]] = {}
    for feature in FEATURES:
        groups.setdefault(feature.group, []).append(feature)
    return groups


def _partners(feature: Feature, refused: Sequence[Refusal]) -> list[str]:
    found = {name for each in refused if feature.name in each.first for name in each.second}
    found |= {name for each in refused if feature.name in each.second for name in each.first}
    return [other.name for other in FEATURES if other.name in found]


def _bold(names: Sequence[str]) -> str:
    return ", ".join(f"**{name}**" for name in names)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Which features can be combined, for a reader: the page docs/compatibility.md, and the answer for some of them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any, Final, NamedTuple

from threefold.config.rules.compatibility import Rule
from threefold.config.rules.features import FEATURES, Cell, Feature, Settings, cells, config_with
from threefold.errors import UserError
from threefold.plugins import one_of


class Refusal(NamedTuple):
    """Features that cannot be combined with others, for one reason.

    Attributes:
        first, second: names; none of the first can be combined with any of the second.
        why: the reason.
        instead: what to use.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    why: str
    instead: str


class Condition(NamedTuple):
    """Two features whose sizes have to fit for them to go together.

    Attributes:
        first, second: their names.
        rule: what has to fit.
        broken: settings that break it, added to those of the two.
    """

    first: str
    second: str
    rule: str
    broken: Settings


CONDITIONS: Final = (
    Condition(
        "tp",
        "llama",
        "`tp` divides the attention heads, and divides the key-value heads or is a multiple of them",
        {"model.num_attention_heads": 12, "model.num_key_value_heads": 3, "model.hidden_size": 24},
    ),
    Condition(
        "tp",
        "zero1",
        "`tp` leaves no rank without rows of the vocabulary; so for each stage",
        {"parallel.tp": 4, "model.vocab_size": 5},
    ),
    Condition("cp", "sp", "`data.sequence_length` divides by `cp · tp` and by `2 · cp`", {"data.sequence_length": 6}),
    Condition(
        "hybrid",
        "ep",
        "`zero_shards` is a multiple or a divisor of `ep`",
        {"parallel.dp": 6, "parallel.zero_shards": 3, "train.global_batch_size": 12},
    ),
    Condition(
        "zero1",
        "ep",
        "the ranks that share the same experts divide `model.hidden_size`; so for each stage",
        {"parallel.dp": 6, "train.global_batch_size": 12},
    ),
    Condition(
        "interleaved",
        "accumulation",
        "micro-batches in equal rounds of `pp` or more; so for `zero-bubble`",
        {"train.gradient_accumulation_steps": 5, "train.global_batch_size": 20},
    ),
    Condition(
        "dualpipev",
        "accumulation",
        "two micro-batches or more for each pipeline rank",
        {"train.gradient_accumulation_steps": 2},
    ),
)
"""What goes together under a condition. A config that breaks it is refused with the nearest value that works."""


def refusals(pairs: Iterable[Cell]) -> list[Refusal]:
    """What cannot be combined of all pairs, each reason once."""
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
    """The page: what cannot be combined and what to use instead, the conditions, the features by group."""
    pairs = list(cells())
    refused = refusals(pairs)
    lines = [_INTRODUCTION.format(features=len(FEATURES), pairs=sum(cell.works for cell in pairs))]
    lines += ["## What cannot be combined", "", "| | with | why | instead |", "|---|---|---|---|"]
    lines += [f"| {_bold(each.first)} | {_bold(each.second)} | {each.why} | {each.instead} |" for each in refused]
    lines += ["", "## What goes together under a condition", "", "| | and | condition |", "|---|---|---|"]
    lines += [f"| **{each.first}** | **{each.second}** | {each.rule} |" for each in CONDITIONS]
    lines += ["", "## The features"]
    for group, features in _grouped().items():
        lines += ["", f"### {group}", "", "| | feature | switched on by | not with |", "|---|---|---|---|"]
        for feature in features:
            others = ", ".join(_partners(feature, refused)) or "–"
            lines.append(f"| **{feature.name}** | {feature.title} | {switches(feature)} | {others} |")
    return "\n".join(lines) + "\n"


def features_named(names: Sequence[str]) -> list[Feature]:
    """The features of these names.

    Raises:
        UserError: there is no such feature; says what there is.
    """
    known = {feature.name: feature for feature in FEATURES}
    for name in names:
        if name not in known:
            raise UserError(f"{name!r} is no feature but must be {one_of(name, list(known))}.")
    return [known[name] for name in names]


def answers(features: Sequence[Feature]) -> Iterator[str]:
    """For one feature what it cannot be combined with, for several whether they go together; a sentence each."""
    if len(features) == 1:
        (feature,) = features
        others = (other for other in FEATURES if other is not feature and not feature.excludes(other))
        refused = [(other, reason) for other in others if (reason := _obstacle((feature, other)))]
        if not refused:
            yield f"{feature.name} ({feature.title}) goes together with all other features."
        yield from (f"not with {other.name}: {reason}" for other, reason in refused)
        return
    broken = 0
    for first, second in combinations(features, 2):
        if reason := _obstacle((first, second)):
            broken += 1
            yield f"{first.name} and {second.name} cannot be combined: {reason}"
    if not broken:
        reason = _obstacle(features)
        together = " and ".join(feature.name for feature in features)
        yield f"{together} cannot be combined: {reason}" if reason else f"{together} can be combined."


def _obstacle(features: Sequence[Feature]) -> str:
    """Why features cannot be combined, as a sentence; empty where they can."""
    for first, second in combinations(features, 2):
        if first.excludes(second):
            key = next(key for key in first.settings if first.settings[key] != second.settings.get(key))
            return f"both are values of {key}; choose one."
    try:
        config_with(features)
    except UserError as error:
        return str(error)
    return ""


def switches(feature: Feature) -> str:
    """The settings that switch a feature on, and those that it needs."""
    given = ", ".join(f"`{key}: {_yaml(value)}`" for key, value in feature.settings.items())
    needs = ", ".join(
        f"`{key}` {_yaml(value)}" + (" or more" if type(value) is int else "") for key, value in feature.needs.items()
    )
    return f"{given}; needs {needs}" if needs else given


_INTRODUCTION = """\
# Compatibility of features

<!-- Written by `make docs` from threefold/config/rules: features.py, compatibility.py and compatibility_page.py. -->

**Any two of these {features} features can be combined, but those of the first table.** Combined, they give the results
of one process, up to rounding: the test suite runs each of the {pairs} pairs. What cannot be combined is refused before
any worker starts, with the reason of the table. Two values of one setting (two schedules, two stages of ZeRO) exclude
each other. For your own combination ask

    threefold config compatibility zero3 zbv         # some features: whether they go together, and why not
    threefold config compatibility compile           # one: what it does not go together with
"""


def _grouped() -> dict[str, list[Feature]]:
    groups: dict[str, list[Feature]] = {}
    for feature in FEATURES:
        groups.setdefault(feature.group, []).append(feature)
    return groups


def _partners(feature: Feature, refused: Sequence[Refusal]) -> list[str]:
    """Names of the features that one cannot be combined with, in order."""
    found = {name for each in refused if feature.name in each.first for name in each.second}
    found |= {name for each in refused if feature.name in each.second for name in each.first}
    return [other.name for other in FEATURES if other.name in found]


def _bold(names: Sequence[str]) -> str:
    return ", ".join(f"**{name}**" for name in names)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

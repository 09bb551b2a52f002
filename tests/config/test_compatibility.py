"""Every cell of docs/compatibility.md: the pair trains what one process trains, or is refused with one sentence.

The quick and slow tests run sets of features that together hold every pair; the sweep runs each pair on its own.
"""

import re
from collections.abc import Callable, Iterator
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any

import pytest

from docs.compatibility import CONDITIONS, Cell, Condition, cells, markdown, refusals
from tests.support.compiled import traced
from tests.support.sweep import sweep
from threefold.config import Config
from threefold.config.rules import RULES
from threefold.errors import UserError
from threefold.models.source import ConfigSource
from threefold.planner.reference import FEATURES, Feature, answers, config_with, features_named
from threefold.verify.batches import RandomBatches
from threefold.verify.compare import GRADIENT, LOSS, Error
from threefold.verify.rank_worker import RankReport, run_rank
from threefold.verify.reference import write_trace

SIXTEEN_BIT = ("bf16", "fp16", "pure-bf16", "fp8", "compressed")
"""Features that compute or sum in at most 16 bits, with results close to those of fp64 but not equal up to rounding."""
CELLS = list(cells())
REFUSALS = refusals(CELLS)
WORKING = [cell for cell in CELLS if cell.works]
RANKS, STEPS = 8, 2
EXACT = 1e-12
NARROW, NARROW_LOSS, NARROW_OF_FEW = 0.1, 1e-2, 0.3
"""Bounds for 16-bit features, against one process in fp64: of the gradients, relative to the largest in the tensor (a
sum over two ranks that is forgotten is off by half); of the loss; of the gradients where experts see few tokens."""

Pair = frozenset[str]
Features = tuple[Feature, ...]


def pair_of(first: Feature, second: Feature) -> Pair:
    return frozenset((first.name, second.name))


TOGETHER = {pair_of(cell.first, cell.second) for cell in WORKING}


def fits(features: Features) -> bool:
    """Whether all of them go together, on as many ranks as there are."""
    if not pairs(features) <= TOGETHER:
        return False
    try:
        parallel = config_with(features).parallel
    except UserError:
        return False
    return parallel.dp * parallel.tp * parallel.pp * parallel.cp <= RANKS


def pairs(features: Features) -> set[Pair]:
    return {pair_of(*pair) for pair in combinations(features, 2)}


def covering(wanted: set[Pair], among: Features) -> Iterator[Features]:
    """Few sets of features that together hold every wanted pair: each takes in what brings most new ones."""
    left = set(wanted)
    names = {feature.name: feature for feature in among}
    while left:
        chosen: Features = tuple(names[name] for name in sorted(min(left, key=sorted)))
        while more := grown(chosen, left, among):
            chosen = more
        left -= pairs(chosen)
        yield chosen


def grown(chosen: Features, left: set[Pair], among: Features) -> Features | None:
    """The set with one feature more, that which brings most of the pairs that are left; None if none brings any."""
    gains = [(len(pairs((*chosen, feature)) & left - pairs(chosen)), feature) for feature in among]
    for gain, feature in sorted(gains, key=lambda item: -item[0]):
        if gain and feature not in chosen and fits((*chosen, feature)):
            return (*chosen, feature)
    return None


PLAIN = tuple(feature for feature in FEATURES if feature.name != "compile")
EXACTLY = tuple(feature for feature in PLAIN if feature.name not in SIXTEEN_BIT)
WANTED = {pair_of(cell.first, cell.second) for cell in WORKING if {cell.first, cell.second} <= set(PLAIN)}
NEARLY = {pair for pair in WANTED if pair & set(SIXTEEN_BIT)}
SETS = [*covering(WANTED - NEARLY, EXACTLY), *covering(NEARLY, PLAIN)]


@pytest.fixture(scope="module")
def compare(pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Features], list[Error]]:
    """What the ranks of a config with these features find beside one process; models alike share its trace."""
    known: dict[str, Path] = {}

    def trace(config: Config) -> Path:
        settings = {name: section for name, section in config.sections().items() if name in ("model", "data")}
        if str(settings) not in known:
            known[str(settings)] = tmp_path_factory.mktemp("one-process")
            alone = config.model_copy(update={"precision": config.precision.model_copy(update={"dtype": "fp64"})})
            pool.run(1, write_trace, ConfigSource(), alone, RandomBatches(), STEPS, str(known[str(settings)]))
        return known[str(settings)]

    def run(features: Features) -> list[Error]:
        config = config_with(features)
        if any(feature.name in SIXTEEN_BIT for feature in features):
            # What is so narrow that rounding alone moves it far: which experts a token goes to, norms of 4 numbers.
            calm = {"experts_per_token": config.model.num_experts or 2, "qk_norm": False}
            config = config.model_copy(update={"model": config.model.model_copy(update=calm)})
        parallel = config.parallel
        ranks = parallel.dp * parallel.tp * parallel.pp * parallel.cp
        folder = trace(config)
        # Graphs of compiled layers run operation by operation; C++ code of them is tested in tests/parallel.
        reports: list[RankReport] = pool.run(
            ranks, traced, run_rank, ConfigSource(), config, RandomBatches(), STEPS, str(folder)
        )
        return [error for report in reports for error in report.errors]

    return run


def check(errors: list[Error], features: Features) -> None:
    assert errors
    narrow = any(feature.name in SIXTEEN_BIT for feature in features)
    few = any(feature.name in ("llama", "experts", "ep", "fp8") for feature in features)
    bounds = {GRADIENT: NARROW_OF_FEW if few else NARROW, LOSS: NARROW_LOSS} if narrow else {}
    wrong = [error for error in errors if error.relative > bounds.get(error.what, inf if narrow else EXACT)]
    assert not wrong, wrong[:3]


def named(features: Features) -> str:
    return "+".join(feature.name for feature in features)


def test_the_page_has_every_feature_and_every_refusal() -> None:
    page = markdown()
    assert [feature.name for feature in FEATURES if f"| **{feature.name}** | {feature.title} |" not in page] == []
    assert REFUSALS
    assert [each.why for each in REFUSALS if f" | {each.why} | {each.instead} |" not in page] == []


def test_sets_hold_every_pair_that_works() -> None:
    assert set().union(*map(pairs, SETS)) >= WANTED


LARGE = 18
"""Features of a set that the quick run takes; the small ones, each for a few pairs that are left, are for the slow, as
are those of two of the 16-bit precisions."""


def marked(features: Features) -> Any:
    quick = len(features) >= LARGE and not {"fp16", "pure-bf16"} & {feature.name for feature in features}
    return pytest.param(features, marks=[] if quick else [pytest.mark.slow], id=named(features))


@pytest.mark.parametrize("features", [marked(features) for features in SETS])
def test_pairs_equal_one_process(compare, features: Features) -> None:
    check(compare(features), features)


COMPILED = [place for place, cell in enumerate(WORKING) if "compile" in (cell.first.name, cell.second.name)]
"""Pairs that no set holds."""


@sweep("cell", WORKING, slow=COMPILED[::8], ids=lambda cell: named((cell.first, cell.second)))
def test_each_pair_alone(compare, cell: Cell) -> None:
    check(compare((cell.first, cell.second)), (cell.first, cell.second))


def test_what_does_not_work_has_a_rule_and_what_has_a_rule_does_not_work() -> None:
    """The rules' names and their predicates say the same, and the sentence is the rule's own."""
    for cell in CELLS:
        assert cell.works == (cell.rule is None), (cell.first.name, cell.second.name, cell.reason)
        if cell.rule is not None:
            sentence = re.sub(r"\\\{.*?\\\}", ".+", re.escape(cell.rule.reason))
            assert re.fullmatch(rf"{cell.rule.key} is \S+ but {sentence}\.", cell.reason)


def test_every_rule_has_a_cell() -> None:
    used = {cell.rule for cell in CELLS}
    assert [(rule.first, rule.second) for rule in RULES if rule not in used] == []


def test_the_table_of_refusals_holds_exactly_the_pairs_that_are_refused() -> None:
    """Each reason once, and what to use instead of it."""
    listed = [frozenset((one, other)) for each in REFUSALS for one in each.first for other in each.second]
    assert len(listed) == len(set(listed))
    assert set(listed) == {pair_of(cell.first, cell.second) for cell in CELLS if not cell.works}
    assert all(each.instead and each.why for each in REFUSALS)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["zero3", "zbv"], ["zero3 and zbv cannot be combined: parallel.zero is 3 but parallel.schedule zbv defers"]),
        (["zero3", "tp", "ep"], ["zero3 and tp and ep can be combined."]),
        (["zero1", "zero3"], ["zero1 and zero3 cannot be combined: both are values of parallel.zero; choose one."]),
        (["dropout"], ["dropout (dropout) goes together with all other features."]),
        (["pure-bf16"], ["not with compressed: parallel.gradient_compression is fp16 but precision.master_weights"]),
    ],
    ids=str,
)
def test_whether_some_features_go_together(names: list[str], expected: list[str]) -> None:
    found = list(answers(features_named(names)))
    assert len(found) == len(expected)
    assert all(answer.startswith(start) for answer, start in zip(found, expected, strict=True))


def test_a_feature_that_there_is_not_is_named_with_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"^'zero4' is not a feature but must be one of dp, .*; the nearest is zero3\.$"
    ):
        features_named(["tp", "zero4"])


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: f"{condition.first}+{condition.second}")
def test_a_condition_that_is_broken_is_refused_and_names_a_value_that_works(condition: Condition) -> None:
    pair = features_named([condition.first, condition.second])
    config_with(pair)
    with pytest.raises(UserError, match=r" but .*; use "):
        config_with(pair, condition.broken)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_every_feature_works_alone_and_is_on(feature: Feature) -> None:
    config = config_with((feature,))
    for key, value in feature.settings.items():
        assert _setting(config, key) == value
    without = config_with(())
    turned_on = feature.needs if feature.name == "cp" else feature.settings  # the method of cp is the default one
    on = [key for key, value in turned_on.items() if _setting(without, key) != value]
    assert on, "none of its settings differs from those of the config without it"


def _setting(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)

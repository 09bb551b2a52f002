"""Weights of a mixture that change, by step or at a resume, against an oracle that adds up each sample's weights."""

import random
from fractions import Fraction

import numpy as np
import pytest

from threefold.config.by_step import NumberByStep, WeightByStep, value_at
from threefold.config.loading import config_of
from threefold.config.resolve import resolve
from threefold.data.order import Blend, ConsumedSamples, whole_weights
from threefold.errors import UserError

STEPS = 60
SIZES = NumberByStep({0: 3, 7: 8, 31: 5})
TABLES = {
    "two": [({0: 3, 10: 1}, 1)],
    "extreme": [({0: 0.001, 20: 0.999}, {0: 0.999, 20: 0.001})],
    "late": [(5, 3, {0: 0, 15: 2}, {0: 1, 40: 0})],
    "many": [
        tuple({0: a, 9: b, 10: c, 33: d} for a, b, c, d in rows)
        for rows in (
            ((1, 0, 5, 1), (1, 0, 5, 2), (1, 0, 0, 3), (1, 0, 0, 4), (1, 4, 0, 5), (1, 4, 0, 6)),
            ((1, 0, 1, 0), (1, 0, 1, 0), (1, 0, 1, 0), (1, 1, 0, 1), (1, 1, 0, 1), (1, 1, 0, 1), (1, 1, 0, 1)),
        )
    ],
}


def weights_of(given: tuple) -> list[float]:
    return [WeightByStep(each) if isinstance(each, dict) else float(each) for each in given]


def due(weights: list[float], sizes: int = SIZES, steps: int = STEPS) -> list[list[Fraction]]:
    """Return, for each sample of the first steps, the sums of the weights up to it, of sum 1 at each sample."""
    sums, rows = [Fraction(0)] * len(weights), []
    for step in range(steps):
        parts = whole_weights([value_at(weight, step) for weight in weights])
        for _ in range(value_at(sizes, step)):
            sums = [total + Fraction(part, sum(parts)) for total, part in zip(sums, parts, strict=True)]
            rows.append(sums)
    return rows


PAUSED = ({0: 0}, {0: 3, 59: 1}, {0: 2, 10: 0.7, 11: 5, 28: 0.3}, {0: 3, 2: 0, 33: 0.3}, {0: 2, 8: 0, 14: 2, 19: 0.7})
"""Weights of 0 of two corpora at once, each with a sample left to come, whose order counts when they go on."""

CASES = [
    *(
        pytest.param(weights_of(each), SIZES, id=f"{name}{n}")
        for name, row in TABLES.items()
        for n, each in enumerate(row)
    ),
    pytest.param(weights_of(PAUSED), 7, id="paused"),
]


@pytest.mark.parametrize(("weights", "sizes"), CASES)
def test_counts_are_exact_to_one_sample_at_every_step(weights: list[float], sizes: int) -> None:
    blend, expected = Blend(weights, ConsumedSamples(sizes)), due(weights, sizes)
    corpora, own = blend(np.arange(len(expected)))
    counts, bound = [0] * len(weights), 1 - Fraction(1, 2 * len(weights) - 2)
    for n, (corpus, counter, sums) in enumerate(zip(corpora.tolist(), own.tolist(), expected, strict=True)):
        assert counter == counts[corpus], "each corpus is read in its own order, nothing twice and nothing left out"
        counts[corpus] += 1
        assert max(abs(a - b) for a, b in zip(counts, sums, strict=True)) <= bound
        assert blend.counts(n + 1).tolist() == counts


@pytest.mark.parametrize(("weights", "sizes"), CASES)
def test_it_goes_on_from_any_step(weights: list[float], sizes: int) -> None:
    """Where each corpus stands is all that a resumed run needs of what it has read."""
    blend, consumed = Blend(weights, ConsumedSamples(sizes)), ConsumedSamples(sizes)
    everything = np.arange(consumed.before(STEPS))
    corpora, own = blend(everything)
    for step in random.Random(1).sample(range(STEPS), 8):
        first = consumed.before(step)
        resumed = Blend(weights, ConsumedSamples(sizes, step, first, blend.standing(first)))
        found = resumed(everything[first:])
        assert np.array_equal(found[0], corpora[first:])
        assert np.array_equal(found[1], own[first:])
        assert resumed.standing(len(everything)) == blend.standing(len(everything))


@pytest.mark.parametrize("period", [(1, 2), (5, 3, 2), (1, 1, 1, 7)])
def test_long_stretches_are_read_by_periods(period: tuple[int, ...]) -> None:
    """A change whose stretches are many periods long, from a beginning that is no multiple of the period."""
    later = period[::-1]
    consumed = ConsumedSamples(NumberByStep({0: 7, 100: 11}))
    weights = [WeightByStep({0: a, 97: b, 300: a}) for a, b in zip(period, later, strict=True)]
    blend, end = Blend(weights, consumed), consumed.before(400)
    corpora, own = blend(np.arange(end))
    changes = [consumed.before(97), consumed.before(300)]
    at = np.arange(1, end + 1)[:, None]
    inside = np.clip(at - changes[0], 0, changes[1] - changes[0])
    ideal = (at - inside) * np.array(period) / sum(period) + inside * np.array(later) / sum(period)
    counts = np.cumsum(corpora[:, None] == np.arange(len(period)), axis=0)
    assert np.abs(counts - ideal).max() <= 1 - 1 / (2 * len(period) - 2) + 1e-9
    assert (own == counts[np.arange(end), corpora] - 1).all()
    far = 10**12 + 7
    assert blend.counts(far).sum() == far


def test_other_weights_at_a_resume_read_each_corpus_on() -> None:
    """Nothing is read twice or left out, and counts stay exact over the change, at the first and at a second one."""
    consumed, counts, sums = ConsumedSamples(8), np.zeros(3, np.int64), np.zeros(3)
    for step, weights in ((50, (5, 3, 2)), (51, (1, 1, 998)), (90, (998, 1, 1)), (400, (1, 2, 0))):
        blend = Blend(weights, consumed)
        corpora, own = blend(np.arange(consumed.samples, 8 * step))
        for corpus, counter in zip(corpora.tolist(), own.tolist(), strict=True):
            assert counter == counts[corpus]
            counts[corpus] += 1
            sums += np.array(weights) / sum(weights)
            assert np.abs(counts - sums).max() < 1
        consumed = ConsumedSamples(8, step, 8 * step, blend.standing(8 * step))


@pytest.mark.parametrize(
    ("mixture", "expected"),
    [
        ({"a": {0: 1, 5: 0}, "b": {0: 0, 7: 1}}, "no corpus has a weight above 0 from entry 5 on; give one"),
        ({"a": {5: 1}, "b": 1}, r"or weights by step, such as \{books: 3, code: \{0: 0, 1000: 1\}\}"),
        ({"a": {0: -1}, "b": 1}, "or weights by step.*"),
        ({"a": 0, "b": 1}, "each above 0, such as {books: 3, code: 1}"),
    ],
    ids=str,
)
def test_each_entry_is_checked(mixture: dict, expected: str) -> None:
    with pytest.raises(UserError, match=rf"^data.mixture is .* but .*{expected}\.$"):
        resolve(config_of({"data": {"mixture": mixture}}), 301)


def test_a_stored_config_has_the_weights() -> None:
    given = {"a": {0: 1.0, 5: 0.0}, "b": 2.0}
    config = resolve(config_of({"data": {"mixture": given}}), 301)
    assert config.sections()["data"]["mixture"] == given
    assert config_of(config.sections()) == config
    assert list(config.data.corpora.values()) == [WeightByStep({0: 1.0, 5: 0.0}), 2.0]

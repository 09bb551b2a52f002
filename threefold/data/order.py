"""Order of a run's samples: how many are consumed before each step, and the corpus of each sample of a mixture.

In a mixture, the corpus of sample n, and which of its samples it is, depend on n and on the weights up to there alone.
So the number of ranks and the batch size change nothing. Where weights change, by step or at a resume, each corpus is
read on from where it stands.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, NamedTuple

import numpy as np

from threefold.config import Config
from threefold.config.by_step import entries_of, parts_by_step, steps_to_sum, sum_before, value_at
from threefold.errors import UserError
from threefold.random import Int64Array

Standing = tuple[tuple[int, str], ...]
"""Samples read of each corpus of a mixture, and by how much that is less than its weights say, as a fraction."""


@dataclass(frozen=True)
class ConsumedSamples:
    """Number of training samples consumed before each step, counted from where a run starts or resumes.

    It determines what a step reads, because the order of samples is a permutation of this count. It is the sum of the
    global batch sizes (`per_step`, which may change by step) until a run resumes with others, at `step`, and counts on.
    `blend` says where each corpus of a mixture stands there (`Blend.standing`), and is empty at the start of a run.
    """

    per_step: int
    step: int = 0
    samples: int = 0
    blend: Standing = ()

    @property
    def has_one_size(self) -> bool:
        """Whether all batches up to now and from now on have one size."""
        return len(entries_of(self.per_step)) == 1 and self.samples == self.step * self.per_step

    def before(self, step: int) -> int:
        """Return the samples consumed before `step` (0 for the first), which must not precede the start or resume."""
        return self.samples + sum_before(self.per_step, step) - sum_before(self.per_step, self.step)

    def steps_until(self, samples: int) -> int:
        """Return the first step before which at least `samples` samples are consumed, as if counted from the start."""
        return steps_to_sum(self.per_step, samples - self.samples + sum_before(self.per_step, self.step))


def read_by_step(config: Config) -> int:
    """Return the samples that each step of a run reads; if their length changes, parts of them (`parts_by_step`)."""
    return parts_by_step(config.train.global_batch_size, config.data.sequence_length)[0]


LONGEST_PERIOD: Final = 65_536
"""Most samples after which a mixture repeats; weights that need more are rounded to multiples of 1/65,536."""


class _Stretch(NamedTuple):
    """Samples of a run with the same weights: their number (None: no end), and those of each corpus in a period."""

    size: int | None
    in_period: tuple[int, ...]

    @property
    def period(self) -> int:
        return sum(self.in_period)


class _Region(NamedTuple):
    """Samples of a run from `first` on, up to the next region, whose corpora repeat after `corpora`, int64 [period].

    At its beginning, `counts` samples of each corpus, int64 [k], have been read, which is `owed` less than its weights
    say. `before` counts the samples of the same corpus before each in the period, int64 [period].
    """

    first: int
    corpora: Int64Array
    before: Int64Array
    in_period: Int64Array
    counts: Int64Array
    owed: tuple[Fraction, ...]
    stretch: _Stretch


class Blend:
    """Corpus of each sample of a run, for k weighted corpora; only the ratios of the weights matter.

    Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32, 1980): after any number of samples,
    the count of each corpus differs from the sum of its weights (of sum 1 at each sample) by at most 1 − 1 / (2k − 2),
    the best bound that holds for all weights, also where they change. With the same weights, the assignment repeats, so
    one period is stored, and the samples before the first and after the last one.
    """

    def __init__(self, weights: Sequence[float], consumed: ConsumedSamples = ConsumedSamples(1)) -> None:
        begins = {0: 0}
        if consumed.blend:
            begins = {consumed.step: consumed.samples}
        ((step, at),) = begins.items()
        later = sorted({each for weight in weights for each, _ in entries_of(weight) if each > step})
        begins |= {each: consumed.before(each) for each in later}
        ends = [*list(begins.values())[1:], None]
        self._stretches = [
            _Stretch(None if end is None else end - first, tuple(whole_weights([value_at(w, step) for w in weights])))
            for (step, first), end in zip(begins.items(), ends, strict=True)
        ]
        self._counts = np.array([count for count, _ in consumed.blend] or [0] * len(weights), dtype=np.int64)
        self._owed = tuple(Fraction(owed) for _, owed in consumed.blend) or (Fraction(0),) * len(weights)
        self._regions: list[_Region] = []
        for number in range(len(self._stretches)):
            at = self._lay(number, at)
        self._firsts = np.array([region.first for region in self._regions])

    def __call__(self, counters: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the corpus of each sample of a run, and how many of that corpus come before it: two int64 [rows]."""
        places = np.searchsorted(self._firsts, counters, side="right") - 1
        corpora, own = np.empty_like(counters), np.empty_like(counters)
        for place in np.unique(places).tolist():
            here, region = places == place, self._regions[max(place, 0)]
            periods, rest = np.divmod(counters[here] - region.first, len(region.corpora))
            corpora[here] = found = region.corpora[rest]
            own[here] = region.counts[found] + periods * region.in_period[found] + region.before[rest]
        return corpora, own

    def counts(self, samples: int) -> Int64Array:
        """Count how many of a run's first `samples` samples come from each corpus: int64 [k]."""
        return self._standing(samples)[0]

    def standing(self, samples: int) -> Standing:
        """Return where each corpus stands after a run's first `samples` samples."""
        counts, owed = self._standing(samples)
        return tuple((count, str(each)) for count, each in zip(counts.tolist(), owed, strict=True))

    def _standing(self, samples: int) -> tuple[Int64Array, list[Fraction]]:
        region = self._regions[max(0, int(np.searchsorted(self._firsts, samples, side="right")) - 1)]
        periods, rest = divmod(done := samples - region.first, len(region.corpora))
        read = periods * region.in_period + np.bincount(region.corpora[:rest], minlength=len(region.counts))
        due = (Fraction(each * done, region.stretch.period) for each in region.stretch.in_period)
        owed = [a + b - c for a, b, c in zip(region.owed, due, read.tolist(), strict=True)]
        return region.counts + read, owed

    def _lay(self, number: int, at: int) -> int:
        """Add the regions of a stretch that begins at sample `at`; return its end.

        A period that ends before the last one of the stretch is read again if it leaves the corpora owed what they
        were: its samples come before the end, and those that may come later do not come in it.
        """
        stretch = self._stretches[number]
        end, period = None if stretch.size is None else at + stretch.size, stretch.period
        while end is None or end - at > 2 * period + 1:
            owed = self._owed
            self._add(at, number, period, end)
            at += period
            if self._owed == owed:
                if end is None:
                    return at
                turns = (end - at - period - 1) // period
                self._counts = self._counts + turns * np.array(stretch.in_period)
                at += turns * period
                break
        self._add(at, number, end - at, end)
        return end

    def _add(self, first: int, number: int, samples: int, end: int | None) -> None:
        """Add a region of a stretch, which ends at sample `end`, and go on to the region's end."""
        stretch = self._stretches[number]
        rest = _Stretch(None if end is None else end - first, stretch.in_period)
        corpora = _assign(self._owed, [rest, *self._stretches[number + 1 :]], samples)
        in_period, before = np.bincount(corpora, minlength=len(self._owed)), np.empty_like(corpora)
        for corpus, count in enumerate(in_period):
            before[corpora == corpus] = np.arange(count)
        self._regions.append(_Region(first, corpora, before, in_period, self._counts, self._owed, stretch))
        due = (Fraction(each * len(corpora), stretch.period) for each in stretch.in_period)
        self._owed = tuple(a + b - c for a, b, c in zip(self._owed, due, in_period.tolist(), strict=True))
        self._counts = self._counts + in_period


def weights_by_step(weights: Sequence[float]) -> list[tuple[int, list[int]]]:
    """Return the steps from which corpora have other ratios of weights, with those ratios (`whole_weights`)."""
    found: list[tuple[int, list[int]]] = []
    for step in sorted({each for weight in weights for each, _ in entries_of(weight)}):
        ratios = whole_weights([value_at(weight, step) for weight in weights])
        if not found or found[-1][1] != ratios:
            found.append((step, ratios))
    return found


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return the samples of each corpus in a period of at most `LONGEST_PERIOD`, in the ratios of the weights."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    parts = [weight / total for weight in exact]
    period = math.lcm(*(part.denominator for part in parts))
    if period <= LONGEST_PERIOD:
        return [int(part * period) for part in parts]
    counts = [int(part * LONGEST_PERIOD) for part in parts]
    largest_rest_first = sorted(range(len(parts)), key=lambda i: counts[i] - parts[i] * LONGEST_PERIOD)
    for i in largest_rest_first[: LONGEST_PERIOD - sum(counts)]:
        counts[i] += 1
    for weight, count in zip(weights, counts, strict=True):
        if count == 0 and weight:
            raise UserError(
                f"data.mixture has a weight of {weight:g}, which is less than one sample in {LONGEST_PERIOD:,}; "
                f"use {float(total / LONGEST_PERIOD):.2g} at least, or leave it out."
            )
    return counts


def _assign(owed: Sequence[Fraction], stretches: Sequence[_Stretch], samples: int) -> Int64Array:
    """Return the corpus of each of the next `samples` samples, at most those of the first stretch: int64 [samples].

    With S the sum of its weights from here on, plus what it is `owed`, sample j of a corpus may come while the count
    stays within the bound: not before S ≥ j + d and not after S ≤ j + 1 − d, with d = 1 / (2k − 2). Among the
    candidates, the one with the earliest deadline is chosen.
    """
    (here, *_), parts = stretches, 2 * len(owed) - 2
    if not parts:
        return np.zeros(samples, dtype=np.int64)
    scale = math.lcm(parts, *(each.denominator for each in owed))
    slack, behind = scale // parts, [int(each * scale) for each in owed]

    def window(corpus: int, sample: int) -> tuple[float, float]:
        begins, ends = sample * scale + slack - behind[corpus], (sample + 1) * scale - slack - behind[corpus]
        share = here.in_period[corpus]
        release = -(-begins * here.period // (share * scale)) if share else (1 if begins <= 0 else math.inf)
        return max(1, release), deadline(corpus, ends)

    def deadline(corpus: int, left: Fraction | int) -> float:
        """Return the last sample at which S, times `scale`, is at most `left`."""
        gone = 0
        for size, in_period in stretches:
            share, period = in_period[corpus], sum(in_period)
            last = left * period // (share * scale) if share else math.inf
            if size is None or last < size:
                return gone + last
            left, gone = left - Fraction(share * size * scale, period), gone + size
        raise AssertionError("the last stretch has no end")

    waiting = [(*window(corpus, 0), corpus, 0) for corpus in range(len(owed))]
    heapq.heapify(waiting)
    ready: list[tuple[float, int, int]] = []
    chosen = np.empty(samples, dtype=np.int64)
    for n in range(1, samples + 1):
        while waiting and waiting[0][0] <= n:
            heapq.heappush(ready, heapq.heappop(waiting)[1:])
        _, corpus, sample = heapq.heappop(ready)
        chosen[n - 1] = corpus
        heapq.heappush(waiting, (*window(corpus, sample + 1), corpus, sample + 1))
    return chosen

"""Difference between a tensor of one record and that of another, and how much of it is rounding."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite, isnan, prod, sqrt
from typing import Final

import torch
from torch import Tensor

from threefold_parity.record import (
    DETAILS,
    GRADIENT,
    INITIAL,
    OUTPUT,
    OUTPUT_GRADIENT,
    UPDATE,
    IndexEntry,
    Key,
    Quantity,
)
from threefold_parity.sketch import Kept

Quantities = Mapping[Key, Quantity]
"""Quantities of one step of a record."""
_BLOCKS: Final = 16
"""Number of parts of a vector that are measured on their own, so that an error in few slices shows."""
_LEAST_BLOCK: Final = 0.25
"""A part with less than this share of the mean magnitude is measured against it."""
SMALL: Final = 1e-3
"""Share of the largest mean magnitude of its kind; a tensor below it is measured against it."""
_FACTOR: Final = 6.0
"""Multiple of the error from noise in the last place that counts as rounding."""
_COMMON_FACTOR: Final = 10.0
"""Multiple of the typical distance of a gradient's scale from that of a run in fp64 that counts as rounding."""
_BIAS: Final = 3.0
"""Multiple of the distance of the gradients' common factor from that of a run in fp64 that counts as rounding."""
_SMOOTH: Final = 0.5
"""Error of an output below which rounding has changed no choice."""
_NARROW: Final = ("bfloat16", "float16")
_FACTOR_AFTER_UPDATES: Final = 20.0
"""The same for updates and everything after them: an adaptive optimizer makes full-size updates of elements near zero
too, and their noise differs greatly from run to run."""
_SHARES: Final = (0.9, 0.5)
"""Shares of the tensors of a kind whose errors, and scales, stay below the noise that its tensors have in common."""
_NOISE: Final = 0.3
"""Share of a gradient that changes in a run with noise if the gradient is nothing but noise."""
_NOISY_PLACES: Final = 4.0
"""Last places of the largest gradient below which a gradient counts as noise, without a run with noise."""
_EPS: Final = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 2e-2, "float16": 5e-3}
"""Error that always counts as rounding with learned tolerances, by the lowest precision."""
_WIDE_EPS: Final = {"bfloat16": 4e-3, "float16": 1e-3}
"""The same where the distance from a run in fp64 is known."""
_LATER: Final = 5.0
"""Factor on the minimum tolerance from the second step on."""
UNEARNED: Final = {OUTPUT: 5.0, OUTPUT_GRADIENT: 15.0, GRADIENT: 15.0}
_UNEARNED_OTHER: Final = 500.0
"""Factor on it if the reference was not run again: for updates, whose small elements an optimizer enlarges."""
_GROWTH: Final = 3.0
"""Growth of the tolerance with each step if the reference was not run again."""
_MOST: Final = 4.0
"""Largest tolerance of an update: with all signs flipped it differs by twice its size, and a part of it by more."""
COMMON: Final = "common factor"
"""Kind of the factor that all gradients have in common: the median of their nearest factors."""


@dataclass(frozen=True)
class Measure:
    """A difference.

    Attributes:
        error: largest norm of a difference relative to the reference, over the grid, the projections and parts of them.
        scale: factor of the reference that is nearest to the candidate; NaN if the reference is zero.
    """

    error: float
    scale: float

    @property
    def off(self) -> float:
        """Distance of the scale from 1."""
        return abs(self.scale - 1) if isfinite(self.scale) else 0.0


def measure(
    candidate: Kept, reference: Kept, least: float = 0.0, scale: float = 1.0, infinities: bool = False
) -> Measure:
    """Compare a tensor with that of the reference, of the same shape, after a division by `scale`.

    Differences are relative to a mean magnitude of an element of at least `least`. What is not finite equals nothing;
    with `infinities`, the same infinities in the same places are equal, as in scores behind a causal mask.
    """
    masked = infinities and _same_infinities(candidate, reference)
    worst, dot, square = 0.0, 0.0, 0.0
    for index, (got, expected) in enumerate(zip(candidate.vectors, reference.vectors, strict=True)):
        a, b = got.flatten() / scale, expected.flatten()
        # An element of a projection is a sum of many, with random signs.
        terms = prod(reference.shape) / max(len(b), 1) if index else 1.0
        floor = least * sqrt(terms)
        finite = torch.isfinite(a) & torch.isfinite(b)
        if not bool(finite.all()):
            if not masked or not torch.equal(torch.isfinite(a), torch.isfinite(b)):
                worst = inf
            a, b = a.where(finite, 0.0), b.where(finite, 0.0)
        dot += float(a @ b) / terms
        square += float(b @ b) / terms
        if not len(b):
            continue
        difference, size = a - b, float(b.norm())
        worst = max(worst, _relative(float(difference.norm()), max(size, floor * sqrt(len(b)))))
        if len(b) >= 2 * _BLOCKS:
            block, lengths = _blocks(len(b))
            zeros = torch.zeros(2, _BLOCKS, dtype=torch.float64)
            norms = zeros.index_add_(1, block, torch.stack([difference, b]).double().square()).sqrt()
            against = norms[1].clamp(min=max(_LEAST_BLOCK * size / sqrt(len(b)), floor) * lengths)
            ratios = torch.where(against > 0, norms[0] / against, torch.where(norms[0] > 0, inf, 0.0))
            worst = max(worst, float(ratios.max()))
    return Measure(worst, dot / square if square > 0 and magnitude(reference) > least else torch.nan)


def _same_infinities(candidate: Kept, reference: Kept) -> bool:
    """Return whether two tensors have no NaN, and infinities of the same signs in the same places of the grid.

    A projection of an infinity may be NaN, the sum of squares is not.
    """
    a, b = candidate.elements, reference.elements
    if isnan(candidate.squares) or isnan(reference.squares) or bool(a.isnan().any() | b.isnan().any()):
        return False
    return torch.equal(a.isinf() * a.sign(), b.isinf() * b.sign())


@cache
def _blocks(size: int) -> tuple[Tensor, Tensor]:
    """Return the block of each element, and the square root of each block's length."""
    parts = torch.arange(size).tensor_split(_BLOCKS)
    lengths = torch.tensor([len(part) for part in parts])
    return torch.repeat_interleave(torch.arange(_BLOCKS), lengths), lengths.double().sqrt()


def _relative(difference: float, size: float) -> float:
    return difference / size if size else (inf if difference else 0.0)


def magnitude(kept: Kept) -> float:
    """Return the mean magnitude (rms) of an element."""
    finite = kept.elements[kept.elements.isfinite()]
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def least_magnitudes(quantities: Iterable[Quantity]) -> dict[str, float]:
    """Return, by kind, the minimum mean magnitude that differences are relative to."""
    largest: dict[str, float] = {}
    for each in quantities:
        largest[each.kind] = max(largest.get(each.kind, 0.0), magnitude(each.kept))
    return {kind: SMALL * value for kind, value in largest.items()}


def last_places(quantities: Iterable[Quantity], dtypes: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Return, by name, the mean distance of a weight's elements from their neighbours in its dtype.

    An update is the difference of two weights, each rounded to such a distance, and is measured against it at least.
    """
    eps: dict[str, float] = {}
    for name, dtype in dtypes:
        eps[name] = max(eps.get(name, 0.0), torch.finfo(getattr(torch, dtype)).eps)
    return {each.name: eps.get(each.name, 0.0) * magnitude(each.kept) for each in quantities if each.kind == INITIAL}


def copy_elements(primary: Kept, entry: IndexEntry, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the kept elements of a further copy, and the same elements of the first copy."""
    first = primary.within(entry.piece, DETAILS[entry.detail]).flatten()
    return values[values.numel() - first.numel() :].double(), first  # the values end with the grid


def copy_error(primary: Kept, entry: IndexEntry, values: Tensor, least: float) -> float:
    """Return the error of a further copy on another rank, relative to the first copy."""
    a, b = copy_elements(primary, entry, values)
    if not bool(b.isfinite().all()):
        return 0.0
    return _relative(float((a - b).norm()), max(float(b.norm()), least * sqrt(max(len(b), 1))))


@dataclass(frozen=True)
class Tolerance:
    """Largest error and distance of the scale that count as rounding."""

    error: float
    scale: float


class Tolerances:
    """Tolerances of every tensor, learned from the reference run again with noise in the last place, and in fp64.

    Noise of a unit in the last place is larger than the rounding of bf16, and misses that within a module. The distance
    of the reference from a run of it in fp64, in the first step, where both have the same weights, says how large the
    rounding is: where it is known, noise counts in proportion to it.

    Args:
        precision: lowest precision of the runs, such as `bfloat16`.
        runs: number of runs with noise to learn from; with none, tolerances are fixed by the precision.
    """

    def __init__(self, precision: str, runs: int = 0) -> None:
        self._least = _EPS.get(precision, _EPS["float32"])
        self._errors: dict[tuple[int, str, str], tuple[float, float]] = {}
        self._eps = torch.finfo(getattr(torch, precision)).eps
        self._precision, self._narrow = precision, precision in _NARROW
        self._least_with_wide = _WIDE_EPS.get(precision, self._least)
        self._wide: dict[tuple[int, str, str], tuple[float, float]] = {}
        self._noise: dict[tuple[int, str], float] = {}
        self._commons: dict[tuple[int, str], list[float]] = {}
        self._runs = runs

    def learn(self, step: int, kind: str, name: str, seen: Measure, wide: bool = False) -> None:
        """Learn a difference between the reference and a run of it with noise, or in fp64, unless it is not finite."""
        if isfinite(seen.error):
            self._commons.clear()
            known = self._wide if wide else self._errors
            error, off = known.get((step, kind, name), (0.0, 0.0))
            known[step, kind, name] = max(error, seen.error), max(off, seen.off)

    @property
    def tells_factors(self) -> bool:
        """Whether the run in fp64 shows that rounding hides less of the gradients than noise does.

        It has to change all outputs little, and no choice, such as a token's expert. In fp32 noise hides no factor that
        matters.
        """
        if not self._wide or not self._narrow:
            return False
        seen = (*self._errors.items(), *self._wide.items())
        return (
            max((error for (step, kind, _), (error, _) in seen if (step, kind) == (1, OUTPUT)), default=inf) < _SMOOTH
        )

    def learn_noise(self, step: int, name: str, gradient: Kept, reference: Kept) -> None:
        share = _relative(float((gradient.elements - reference.elements).norm()), float(reference.elements.norm()))
        self._noise[step, name] = max(self._noise.get((step, name), 0.0), share)

    def is_noise(self, step: int, name: str, gradient: Kept, largest: float) -> bool:
        """Return whether a gradient is 0 up to rounding, such as that of a key's bias in softmax attention.

        `gradient` is the reference's, and `largest` the mean magnitude of the largest gradient.
        """
        if self._runs:
            return self._noise.get((step, name), 0.0) > _NOISE
        return magnitude(gradient) <= _NOISY_PLACES * self._eps * largest

    def of(self, step: int, kind: str, name: str) -> Tolerance:
        if not self._runs:
            error = self._least * UNEARNED.get(kind, _UNEARNED_OTHER) * _GROWTH ** (max(step, 1) - 1)
            return Tolerance(error, error)
        own = self._errors.get((step, kind, name), (0.0, 0.0))
        common = self._common(step, kind)
        factor = _FACTOR_AFTER_UPDATES if kind == UPDATE or step > 1 else _FACTOR
        error, off = (factor * max(pair) for pair in zip(own, common, strict=True))
        least = (self._least if kind != "number" else self._least / 10) * (_LATER if step > 1 else 1.0)
        if self._wide and step == 1 and kind in (COMMON, *UNEARNED):
            wide = self._of_wide(kind, name, own)
            if kind in (GRADIENT, COMMON) and self.tells_factors:  # the outputs of one sample vary more
                return wide
            return Tolerance(max(error, least, wide.error), max(off, least, wide.scale))
        if kind == UPDATE:
            error, off = min(error, _MOST), min(off, _MOST)
        return Tolerance(max(error, least), max(off, least))

    def _of_wide(self, kind: str, name: str, noise: tuple[float, float]) -> Tolerance:
        """Return the tolerance of a quantity of the first step, given its noise, from the run in fp64."""
        at = GRADIENT if kind == COMMON else kind
        ours = {key: values for key, values in self._wide.items() if key[1] == at}
        known = [(self._errors.get(key, (0.0, 0.0))[0], values[0]) for key, values in ours.items()]
        shares = sorted(wide / noisy for noisy, wide in known if noisy and wide)
        share = shares[len(shares) // 2] if shares else 1.0
        own, least = self._wide.get((1, kind, name), (0.0, 0.0)), self._least_with_wide
        if kind == COMMON:
            off = max(_FACTOR * share * noise[1], _BIAS * own[1], least)
            return Tolerance(off, off)
        common = _typical(ours.values())
        error, off = (_FACTOR * max(share * mine, wide) for mine, wide in zip(noise, own, strict=True))
        return Tolerance(max(error, _FACTOR * common[0], least), max(off, _COMMON_FACTOR * common[1], least))

    def of_number(self, step: int, name: str, value: float) -> float:
        """Return the tolerance of a number that ranks report, given the reference's.

        One that a narrow dtype represents exactly has been rounded to it.
        """
        dtype, tolerance = getattr(torch, self._precision), self.of(step, "number", name).error
        is_rounded = self._narrow and float(torch.tensor(value, dtype=torch.float64).to(dtype)) == value
        return max(tolerance, self._eps) if is_rounded else tolerance

    def _common(self, step: int, kind: str) -> list[float]:
        if (step, kind) not in self._commons:
            seen = [values for (at, what, _), values in self._errors.items() if (at, what) == (step, kind)]
            self._commons[step, kind] = _typical(seen)
        return self._commons[step, kind]


def _typical(seen: Iterable[tuple[float, float]]) -> list[float]:
    """Return the error that 9 of 10 tensors of a kind stay below, and the distance of the scale of half of them.

    The noise of a few runs says little about one tensor: a small element, which an optimizer enlarges, may change its
    sign in the next.
    """
    ranked = [sorted(values) for values in zip(*seen, strict=True)] or [[0.0], [0.0]]
    return [values[int(share * (len(values) - 1))] for values, share in zip(ranked, _SHARES, strict=True)]

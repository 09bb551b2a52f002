"""Shape of a mistake: a description of what turns the reference's tensor into the candidate's.

Tried in order: a constant factor, shards along a dim that are missing, scaled or in another order, an interleaved or
transposed matrix, a shift by one place. An explanation counts only if it explains the whole tensor.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import isfinite, prod
from typing import Any, Final

import torch
from torch import Tensor

from threefold_parity.sketch import Kept

NOT_FINITE: Final = "is not finite in either run"
"""Shape of what cannot be compared."""
_SHARDS: Final = (2, 3, 4, 6, 8, 12, 16)
_CLOSE: Final = 0.05
"""Largest relative error of an explanation."""
_LEFT: Final = 0.2
"""Largest part of a factor's distance from 1 that it may leave unexplained."""
_NAMED: Final = 0.01
"""Relative distance within which a factor matches a named number."""


@dataclass(frozen=True)
class Factors:
    """Numbers of a run that a factor may come from, by name, such as 2 for `tp`."""

    values: Mapping[str, float]

    @classmethod
    def of_run(cls, facts: Mapping[str, Any], step: int, reference: Mapping[str, Any]) -> "Factors":
        """Return the numbers of a candidate's record at a step: axes, ranks, micro-batches, samples, valid tokens."""
        numbers = facts.get("numbers", {}).get(str(step), {})
        whole = reference.get("numbers", {}).get(str(step), {})
        values: dict[str, float] = {name: size for name, size in facts.get("axes", {}).items() if size > 1}
        if facts["world_size"] > 1 and facts["world_size"] not in values.values():
            values["ranks"] = facts["world_size"]
        if numbers.get("micro_batches", 0) > 1:
            values["micro-batches"] = numbers["micro_batches"]
        for name, key in (("samples", "samples"), ("valid tokens", "valid_tokens")):
            found = whole.get(key, 0)
            count = len(found) if isinstance(found, list) else found
            if count > 1:
                values[name] = count
        return cls(values)

    def name(self, factor: float) -> str:
        """Return a factor in words: `2 (tp)`, `1/4 (1 / micro-batches)` or `1.37`."""
        if abs(factor - 1) < 2 * _NAMED:
            return f"{factor:.6g}"
        both = (*self.values.items(), *((f"1 / {name}", 1 / value) for name, value in self.values.items()))
        simple = [each for each in both if abs(factor / each[1] - 1) < _NAMED]
        if simple:
            return f"{_number(simple[0][1])} ({' or '.join(text for text, _ in simple)})"
        for text, value in self._compound():
            if abs(factor / value - 1) < _NAMED:
                return f"{_number(value)} ({text})"
        for value in (2.0, 0.5, 3.0, 1 / 3, 4.0, 0.25, 8.0, 0.125, -1.0):
            if abs(factor / value - 1) < _NAMED:
                return _number(value)
        return f"{factor:.4g}"

    def _compound(self) -> Iterator[tuple[str, float]]:
        for (one, first), (other, second) in combinations(self.values.items(), 2):
            yield f"{one} · {other}", first * second
            yield f"1 / ({one} · {other})", 1 / (first * second)
            yield f"{one} / {other}", first / second
            yield f"{other} / {one}", second / first
        for name, value in self.values.items():
            yield f"{name}²", value**2
            yield f"1 / {name}²", 1 / value**2


def _number(value: float) -> str:
    if value >= 1 or value < 0:
        return f"{value:.6g}"
    return f"1/{1 / value:.6g}" if abs(1 / value - round(1 / value)) < 1e-6 else f"{value:.4g}"


def shape_of(
    candidate: Kept, reference: Kept, factors: Factors, tolerance: float, scale_tolerance: float | None = None
) -> str | None:
    """Return the shape of the mistake as a predicate, such as `is 2 (tp) times the reference`; None if unexplained.

    `tolerance` and `scale_tolerance` are the error, and the distance of a factor from 1 (by default the same), that
    count as rounding.
    """
    close = min(max(3 * tolerance, 1e-6), _CLOSE)
    whole_a, whole_b = _all(candidate), _all(reference)
    finite = bool(torch.isfinite(whole_a).all()), bool(torch.isfinite(whole_b).all())
    if not all(finite):
        return NOT_FINITE if not any(finite) else "is not finite" if finite[1] else "is finite, unlike the reference"
    if not whole_b.any():
        return "is not zero, as in the reference" if whole_a.any() else None
    if not whole_a.any():
        return "is zero"
    scale = float(whole_a @ whole_b / (whole_b @ whole_b))
    left = _error(whole_a, whole_b * scale)
    least = tolerance if scale_tolerance is None else scale_tolerance
    if abs(scale - 1) > least and left < min(close, _LEFT * abs(scale - 1)):
        return f"is {factors.name(scale)} times the reference"
    if text := next(_of_dims(candidate, reference, factors, close), None):
        return text
    if len(reference.shape) != 2 or reference.shape[0] != reference.shape[1]:
        return None
    if reference.projections:  # signs depend on the size alone, so that both dims have the same
        pairs = list(zip(candidate.projections, reversed(reference.projections), strict=True))
    else:
        pairs = [(candidate.elements, reference.elements.T)]
    return "is the transpose of the reference" if all(_error(a, b) < close for a, b in pairs) else None


def _all(kept: Kept) -> Tensor:
    parts = [kept.elements.flatten()]
    for dim, projection in enumerate(kept.projections):
        parts.append(projection / max(prod(kept.shape) / max(kept.shape[dim], 1), 1) ** 0.5)
    return torch.cat(parts)


def _of_dims(candidate: Kept, reference: Kept, factors: Factors, close: float) -> Iterator[str]:
    counts = sorted({*_SHARDS, *(int(value) for value in factors.values.values() if 1 < value <= 64)})
    slices = [(_slices(candidate, dim), _slices(reference, dim)) for dim in range(len(reference.shape))]
    for dim, (a, b) in enumerate(slices):
        for count in counts:
            if len(b) % count == 0 and len(b) >= count and (text := _of_shards(a, b, dim, count, factors, close)):
                yield text
    for dim, (a, b) in enumerate(slices):
        if candidate.projections and len(b) != reference.shape[dim]:
            continue  # pooled: orders within a part do not show
        for count in counts:
            if len(b) % count == 0 and len(b) > count:
                parted = b.view(count, len(b) // count, -1).transpose(0, 1).reshape(len(b), -1)
                if _error(a, parted) < close:
                    yield f"has {count} blocks along dim {dim} interleaved"
                parted = b.view(len(b) // count, count, -1).transpose(0, 1).reshape(len(b), -1)
                if _error(a, parted) < close:
                    yield f"has {count} interleaved blocks along dim {dim} one after the other"
        if len(b) > 2 and min(_error(a[1:], b[:-1]), _error(a[:-1], b[1:])) < close:
            yield f"is shifted by one place along dim {dim}"


def _slices(kept: Kept, dim: int) -> Tensor:
    """Return a matrix with a row for each index along a dim: all elements, or those of the projection."""
    if kept.projections:
        return kept.projections[dim][:, None]
    return kept.elements.movedim(dim, 0).reshape(kept.elements.shape[dim], -1)


def _of_shards(a: Tensor, b: Tensor, dim: int, count: int, factors: Factors, close: float) -> str | None:
    parts_a, parts_b = a.chunk(count), b.chunk(count)
    typical = float(b.norm()) / count**0.5
    sources, scales = list(range(count)), [1.0] * count
    for number, (part, expected) in enumerate(zip(parts_a, parts_b, strict=True)):
        if float(part.norm()) < close * typical:
            scales[number] = 0.0 if float(expected.norm()) > close * typical else 1.0
            continue
        order = [number, *(other for other in range(count) if other != number)]
        source = next((other for other in order if _error(part, parts_b[other]) < close), None)
        if source is not None:
            sources[number] = source
            continue
        scale = float((part * expected).sum() / expected.square().sum().clamp_min(1e-300))
        if not isfinite(scale) or _error(part, expected * scale) >= close:
            return None
        scales[number] = scale
    moved = [number for number in range(count) if sources[number] != number]
    changed = [number for number in range(count) if scales[number] != 1.0]
    if moved and not changed and len(set(sources)) == count:
        return f"has shards along dim {dim} (of {count}) in the order {', '.join(map(str, sources))}"
    if moved or not changed or len(changed) == count:
        return None
    shards = ", ".join(map(str, changed))
    plural = "s" if changed[1:] else ""
    if all(scales[number] == 0.0 for number in changed):
        return f"lacks shard{plural} {shards} of {count} along dim {dim} (zero)"
    if max(scales[n] for n in changed) - min(scales[n] for n in changed) < _NAMED * abs(scales[changed[0]]):
        factor = factors.name(scales[changed[0]])
        return f"has shard{plural} {shards} of {count} along dim {dim} at {factor} times the reference"
    return None


def _error(a: Tensor, b: Tensor) -> float:
    size = float(b.norm())
    return float((a - b).norm()) / size if size else (0.0 if not a.any() else float("inf"))

"""Comparison of the tensors of a step: their tolerances, the shapes of departures, and the ranks that hold them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite, nan, sqrt
from operator import itemgetter
from statistics import median
from typing import Final

from threefold_parity.departure import LOOSE, SUMMED, Departure, Findings, without_key
from threefold_parity.measure import (
    COMMON,
    SMALL,
    Measure,
    Quantities,
    Tolerance,
    Tolerances,
    copy_elements,
    copy_error,
    least_magnitudes,
    magnitude,
    measure,
)
from threefold_parity.mistake import Factors, shape_of
from threefold_parity.record import (
    GRADIENT,
    INITIAL,
    OUTPUT,
    OUTPUT_GRADIENT,
    STATE,
    TENSOR,
    UPDATE,
    Key,
    Quantity,
    Record,
)
from threefold_parity.sketch import Kept

_SAME: Final = 0.1
"""Largest error at which a tensor counts as another tensor of the reference."""
_COPIES: Final = 0.05
"""Largest error of a copy. Ranks compute copies from the same numbers, so this is small even where rounding decides
most of a tensor, as in updates of bf16; it is not 0, since some kernels add in any order."""


@dataclass(frozen=True)
class StepPair:
    """A step of two records, from 1; 0 for before the first.

    Attributes:
        expected, got: quantities of the step in each.
        tolerances: what counts as rounding.
    """

    step: int
    reference: Record
    candidate: Record
    expected: Quantities
    got: Quantities
    tolerances: Tolerances

    @cached_property
    def factors(self) -> Factors:
        return Factors.of_run(self.candidate.facts, max(self.step, 1), self.reference.facts)


@dataclass(frozen=True)
class TensorStep(StepPair):
    """Tensors of one step of two records.

    Attributes:
        before: the reference's quantities of the previous step, to recognize a tensor that is one step late.
        places: distance of a weight from its neighbours, by name (`last_places`).
    """

    before: Quantities | None = None
    places: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def least(self) -> dict[str, float]:
        return least_magnitudes(self.expected.values())

    @cached_property
    def ordered(self) -> list[tuple[Key, Quantity]]:
        """Quantities of the reference in the order of recording."""
        return sorted(self.expected.items(), key=lambda item: item[1].order)

    @cached_property
    def factors_of_samples(self) -> dict[str, float]:
        """Factor, by sample, of the gradient where the backward pass begins.

        Ranks and micro-batches scale their losses differently, and compensate for it when they sum gradients, so
        gradients of outputs are compared relative to the first. The gradients of parameters show whether the sum is
        right.
        """
        found: dict[str, float] = {}
        for key, reference in self.ordered:
            got = self.got.get(key)
            if reference.kind != OUTPUT_GRADIENT or reference.sample in found:
                continue
            if got is not None and _comparable(got, reference):
                scale = measure(got.kept, reference.kept, 0.0).scale
                if isfinite(scale) and scale:
                    found[reference.sample] = scale
        return found

    @cached_property
    def unreached(self) -> set[str]:
        """Modules of the candidate whose outputs no backward pass has reached."""
        step = str(self.step)
        return {name for facts in self.candidate.ranks for name in facts["numbers"].get(step, {}).get("unreached", ())}

    @cached_property
    def measured(self) -> dict[Key, Measure]:
        """Differences of the tensors that both records have whole."""
        both = ((key, reference, self.got.get(key)) for key, reference in self.expected.items())
        return {
            key: self._measure(other, reference)
            for key, reference, other in both
            if other is not None and _comparable(other, reference)
        }

    @cached_property
    def common_scale(self) -> float:
        """Median of the factors that are nearest for the gradients; NaN without any."""
        scales = [seen.scale for key, seen in self.measured.items() if key[0] == GRADIENT and isfinite(seen.scale)]
        return median(scales) if scales else nan

    def learn(self, wide: bool = False) -> None:
        """Learn the differences from a run with noise, or from the first step of one in fp64, as rounding."""
        for key, seen in self.measured.items():
            kind, name, _ = key
            self.tolerances.learn(self.step, kind, name, seen, wide)
            if kind == GRADIENT and not wide:
                self.tolerances.learn_noise(self.step, name, self.got[key].kept, self.expected[key].kept)
        self.tolerances.learn(self.step, COMMON, "", Measure(0.0, self.common_scale), wide)

    def _scale(self, reference: Quantity) -> float:
        """Return the factor to divide the other tensor by."""
        return self.factors_of_samples.get(reference.sample, 1.0) if reference.kind == OUTPUT_GRADIENT else 1.0

    def _measure(self, got: Quantity, reference: Quantity) -> Measure:
        least = self.least.get(reference.kind, 0.0)
        if reference.kind == UPDATE:
            least = max(least, self.places.get(reference.name, 0.0))
        return measure(got.kept, reference.kept, least, self._scale(reference), reference.kind == OUTPUT)

    def compare(self, found: Findings) -> Iterator[Departure]:
        """Yield the departures, and count the compared quantities in `found`."""
        groups: dict[tuple[str, str], list[tuple[Quantity, Quantity | None]]] = {}
        for key, reference in self.ordered:
            groups.setdefault((reference.kind, reference.name), []).append((reference, self.got.get(key)))
        for key, got in self.got.items():
            if got.kind == GRADIENT and key not in self.expected and bool(got.kept.elements.any()):
                yield Departure(self.step, GRADIENT, got.name, 1.0, 0.0, nan, "is there, and the reference has none")
        largest, departed = self.least.get(GRADIENT, 0.0) / SMALL, False
        gradients = [each for each in self.expected.values() if each.kind == GRADIENT]
        noise = {each.name for each in gradients if self.tolerances.is_noise(self.step, each.name, each.kept, largest)}
        for (kind, name), pairs in groups.items():
            missing = list(self._missing(kind, name, pairs))
            yield from missing
            compared = [(ours, other) for ours, other in pairs if other is not None and _comparable(other, ours)]
            if kind in (OUTPUT, OUTPUT_GRADIENT) and len(compared) < len(pairs):
                found.skipped.add(name)
            is_update = kind == UPDATE or kind.startswith(STATE)  # an optimizer makes whole updates of noise
            if missing or (compared and name not in noise):
                found.totals[self.step, without_key(kind)] += 1
            if not compared or (name in noise and is_update):
                continue
            tolerance = self.tolerances.of(self.step, kind, name)
            if kind == UPDATE and (place := self.places.get(name, 0.0)):
                least = place / max(place, *(magnitude(each.kept) for each, _ in pairs))
                tolerance = Tolerance(max(tolerance.error, least), max(tolerance.scale, least))
            if kind == INITIAL:
                tolerance = Tolerance(SUMMED, SUMMED)
            allowed = max(tolerance.error, 1e-6)
            if name not in noise:
                allowed = min(allowed, _COPIES)
                if tolerance.error > LOOSE:
                    found.loose.add(name)
            departures = list(self._group(found, compared, tolerance, allowed))
            departed |= kind == GRADIENT and bool(departures)
            yield from departures
        if self.step != 1 or departed or not self.tolerances.tells_factors:
            return
        # A factor that all gradients have in common would hide in the rounding of each.
        scale, least = self.common_scale, self.tolerances.of(self.step, COMMON, "").scale
        if abs(scale - 1) > least:
            shape = f"is {self.factors.name(round(scale, 4))} times the reference"
            for kind, name in groups:
                if kind == GRADIENT and name not in noise:
                    yield Departure(self.step, GRADIENT, name, abs(scale - 1), least, scale, shape)

    def _missing(self, kind: str, name: str, pairs: list[tuple[Quantity, Quantity | None]]) -> Iterator[Departure]:
        """Yield a departure if the candidate lacks a tensor of a parameter, or elements of it, that the reference has.

        The output of a module may not be recorded everywhere; a missing one is counted as skipped, as is a gradient of
        it unless no backward pass reached the output. Optimizers of other frameworks may keep other states, but not
        parts of a state.
        """
        if kind == OUTPUT_GRADIENT and name in self.unreached:
            lacking = [ours for ours, other in pairs if other is None and bool(ours.kept.elements.any())]
            if lacking:
                where = f"{len(lacking)} of {len(pairs)} samples" if len(lacking) < len(pairs) else ""
                readers = self._readers(name)
                shape = "is missing, as after a detach"
                yield Departure(self.step, kind, name, 1.0, 0.0, 0.0, shape, where, readers=readers)
        if kind in (OUTPUT, OUTPUT_GRADIENT, TENSOR):
            return
        for reference, other in pairs:
            if other is None:
                if not kind.startswith(STATE) and bool(reference.kept.elements.any()):
                    yield Departure(self.step, kind, name, 1.0, 0.0, 0.0, "is missing")
            elif other.kept.shape != reference.kept.shape:
                shapes = f"{other.kept.shape} instead of {reference.kept.shape}"
                yield Departure(self.step, kind, name, 1.0, 0.0, nan, f"has the shape {shapes}")
            elif other.missing > 0 and not reference.missing:
                yield Departure(self.step, kind, name, 1.0, 0.0, nan, f"lacks {other.missing:,} elements")

    def _group(
        self, found: Findings, pairs: list[tuple[Quantity, Quantity]], tolerance: Tolerance, allowed: float
    ) -> Iterator[Departure]:
        """Compare the tensors of one kind and name, and yield the departure of the worst of them."""
        kind, name = pairs[0][0].kind, pairs[0][0].name
        measured: list[tuple[float, Measure, Quantity, Quantity]] = []
        for reference, other in pairs:
            found.compared[kind] += 1
            whole = not other.kept.projections and not reference.kept.projections
            found.whole[kind, name] = found.whole.get((kind, name), True) and whole
            seen = self._measure(other, reference)
            ratio = max(seen.error / tolerance.error, seen.off / tolerance.scale)
            measured.append((ratio, seen, reference, other))
        ratio, seen, reference, other = max(measured, key=itemgetter(0))
        key = self.step, kind, name
        found.worst[key] = max(found.worst.get(key, 0.0), ratio)
        copies = self._copies(other, allowed)
        if ratio > 1:
            if copies:  # before a factor, which would be that of the first copy alone
                shape = self._reduced(other, reference, tolerance) or copies[1]
            else:
                shape = self._shape(other, reference, tolerance)
            if not shape and seen.error <= tolerance.error:
                shape = f"is about {self.factors.name(round(seen.scale, 4))} times the reference"
            where = self._where(other, reference, tolerance, sum(each[0] > 1 for each in measured), len(pairs))
            readers = self._readers(name) if kind == OUTPUT_GRADIENT else ""
            at = self.step, kind, name, seen.error, tolerance.error, seen.scale
            yield Departure(*at, shape, where, copies is not None, readers)
        elif copies:
            found.worst[key] = max(found.worst[key], copies[0] / allowed)
            yield Departure(self.step, kind, name, copies[0], allowed, nan, copies[1], copies[2], True)

    def _readers(self, name: str) -> str:
        readers = self.reference.facts.get("readers", {}).get(name, [])
        leaves = [each for each in readers if not any(other.startswith(f"{each}.") for other in readers)]
        return leaves[0] if len(leaves) == 1 else f"{', '.join(leaves[:-1])} or {leaves[-1]}" if leaves else ""

    def _shape(self, got: Quantity, reference: Quantity, tolerance: Tolerance) -> str:
        kept, scale = got.kept, self._scale(reference)
        if scale != 1.0:
            projections = [each / scale for each in kept.projections]
            kept = replace(kept, projections=projections, elements=kept.elements / scale)
        if text := shape_of(kept, reference.kept, self.factors, tolerance.error, tolerance.scale):
            return text
        if copies := self._reduced(got, reference, tolerance):
            return copies
        if other := self._another(kept, reference, tolerance):
            return f"is {other} of the reference"
        if self.before is None or reference.kind not in (GRADIENT, UPDATE):
            return ""
        last = self.before.get((reference.kind, reference.name, reference.sample))
        if last is None or last.kept.detail != kept.detail:
            return ""
        if measure(kept, last.kept).error < _near(tolerance):
            return f"is the one of step {self.step - 1}"
        both = [a + b for a, b in zip(reference.kept.projections, last.kept.projections, strict=True)]
        total = replace(kept, squares=nan, projections=both, elements=reference.kept.elements + last.kept.elements)
        if measure(kept, total).error < _near(tolerance):
            return f"has the one of step {self.step - 1} added"
        return ""

    def _another(self, kept: Kept, reference: Quantity, tolerance: Tolerance) -> str:
        """Return the name of another parameter that has these values, as if layers were counted from another start."""
        if reference.kind in (OUTPUT, OUTPUT_GRADIENT) or len(reference.kept.shape) < 1:
            return ""
        for other in self.expected.values():
            alike = (other.kind, other.kept.shape, other.kept.detail) == (reference.kind, kept.shape, kept.detail)
            if not alike or other.name == reference.name:
                continue
            if measure(other.kept, reference.kept).error > 0.1 and measure(kept, other.kept).error < _near(tolerance):
                return other.name
        return ""

    def _reduced(self, got: Quantity, reference: Quantity, tolerance: Tolerance) -> str:
        """Return how the ranks' different copies combine to the reference, if they do."""
        whole = [(entry, values) for _, entry, values in got.copies if entry.size == reference.kept.shape]
        if not whole:
            return ""
        (entry, values), *_ = whole
        _, mine = copy_elements(got.kept, entry, values)
        _, expected = copy_elements(reference.kept, entry, values)
        shares = [copy_elements(got.kept, entry, values)[0] for entry, values in whole]
        if any(len(each) != len(mine) for each in shares):
            return ""
        close, size = max(10 * tolerance.error, 1e-6), float(expected.norm())
        different = [mine]  # replicas of a rank with another share repeat it
        for share in shares:
            if all(float((share - known).norm()) >= close * size for known in different):
                different.append(share)
        if not size or len(different) == 1:
            return ""
        total = sum(different[1:], mine)
        if float((total / len(different) - expected).norm()) < close * size:
            return "differs from rank to rank, and the mean over ranks would be right"
        if float((total - expected).norm()) < close * size:
            return "differs from rank to rank, and the sum over ranks would be right"
        return ""

    def _copies(self, got: Quantity, allowed: float) -> tuple[float, str, str] | None:
        """Return the error, the shape and the ranks of copies that differ from the first."""
        least = self.least.get(got.kind, 0.0)
        first = {rank for _, rank in got.owners}  # a rank may have two samples of the same tokens
        errors = {
            rank: copy_error(got.kept, entry, values, least)
            for rank, entry, values in got.copies
            if (rank not in first or entry.copy) and not entry.partial
        }
        departing = {rank: error for rank, error in errors.items() if not error <= allowed}
        if not departing:
            return None
        owner = got.owners[0][1] if got.owners else 0
        named = _named(sorted(departing))
        return max(departing.values()), f"differs between ranks that hold copies: {named} from rank {owner}", named

    def _where(self, got: Quantity, reference: Quantity, tolerance: Tolerance, departing: int, count: int) -> str:
        if reference.sample and departing < count:
            return f"{departing} of {count} samples"
        if len(got.owners) < 2:
            return ""
        typical, wrong = float(reference.kept.elements.norm()) / sqrt(len(got.owners)), set()
        for piece, rank in got.owners:
            a, b = (each.kept.within(piece, each.kept.detail) for each in (got, reference))
            if a.numel() and float((a - b).norm()) > tolerance.error * max(float(b.norm()), 0.1 * typical):
                wrong.add(rank)
        if not wrong or len(wrong) == len({rank for _, rank in got.owners}):
            return ""
        return f"in the shard{'s' if len(wrong) > 1 else ''} of {_named(sorted(wrong))}"


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}"


def _comparable(got: Quantity, reference: Quantity) -> bool:
    return got.missing == reference.missing == 0 and got.kept.shape == reference.kept.shape


def _near(tolerance: Tolerance) -> float:
    """Return the error below which two tensors count as the same; wide tolerances would match any two."""
    return min(3 * tolerance.error, _SAME)

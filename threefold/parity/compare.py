"""The comparison of two records: every quantity that departs, and where the departure begins.

Quantities are taken in the order in which a step computes them: initial weights, samples, outputs in the order of the
forward pass, loss, input gradients in that of the backward pass, gradients, their norm, learning rates, updates,
optimizer states, buffers. The first that departs is where the mistake is, or right behind it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan, nan, sqrt
from typing import Any, Final

from threefold.errors import UserError
from threefold.files import shown
from threefold.parity.measure import (
    Measure,
    Quantities,
    Tolerance,
    Tolerances,
    copy_elements,
    copy_error,
    least_magnitudes,
    measure,
)
from threefold.parity.mistake import Factors, shape_of
from threefold.parity.record import (
    BUFFER,
    GRADIENT,
    INITIAL,
    INPUT_GRADIENT,
    OUTPUT,
    STATE,
    TENSOR,
    UPDATE,
    Quantity,
    Record,
)

SAMPLES, LOSS, NORM, NUMBER, RATE, COPY = "samples", "loss", "gradient norm", "number", "counter", "copies"
_SAME: Final = 1e-6
"""Relative difference of initial weights and counters that counts as rounding."""
PHASES: Final = (
    INITIAL,
    SAMPLES,
    OUTPUT,
    LOSS,
    INPUT_GRADIENT,
    GRADIENT,
    NORM,
    RATE,
    UPDATE,
    STATE,
    BUFFER,
    TENSOR,
    NUMBER,
)
"""Kinds in the order of a step."""

_COUNTERS: Final = {"lr": "learning rate", "weight_decay": "weight decay", "updates": "count of updates"}


@dataclass(frozen=True)
class Departure:
    """A quantity that differs by more than rounding.

    Attributes:
        step: from 1; 0 for before the first.
        kind: one of `PHASES`.
        name: of the parameter, module or number.
        error, tolerance: relative error, and the one that counts as rounding.
        scale: nearest factor of the reference.
        shape: shape of the mistake, a predicate; empty if none explains the difference.
        where: ranks or shards, where that can be told.
        copies: whether ranks that should hold the same values differ.
    """

    step: int
    kind: str
    name: str
    error: float
    tolerance: float
    scale: float = nan
    shape: str = ""
    where: str = ""
    copies: bool = False

    def __str__(self) -> str:
        """Format as `the gradient of blocks.0.mlp.up.weight`."""
        kind = self.kind
        if kind == INPUT_GRADIENT:
            return f"the gradient of the input of {self.name}"
        if kind in (SAMPLES, LOSS, NORM):
            return {SAMPLES: "the samples", LOSS: "the loss", NORM: "the gradient norm"}[kind]
        if kind.startswith(STATE):
            return f"{kind.removeprefix(STATE).strip()} of {self.name} in the optimizer"
        if kind in (NUMBER, TENSOR):
            return f"{self.name}"
        if kind == RATE:
            key, _, name = self.name.partition(" of ")
            return f"the {_COUNTERS.get(key, key)} of {name}"
        return f"the {kind} of {self.name}"


@dataclass
class Comparison:
    """What was compared, and what departs, in the order of a step.

    Attributes:
        departures: all of them.
        compared: number of compared quantities by kind.
        steps: number of compared steps.
        notes: sentences on what could not be compared, or explains a departure.
        order: modules in the order of the forward pass, for the tree.
        worst: largest error by step, kind and name, relative to its tolerance.
        totals: number of compared names by step and kind.
    """

    departures: list[Departure] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    notes: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    worst: dict[tuple[int, str, str], float] = field(default_factory=dict)
    totals: dict[tuple[int, str], int] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return not self.departures

    @property
    def first(self) -> Departure | None:
        return self.departures[0] if self.departures else None


def compare(
    reference: Record,
    candidate: Record,
    noisy: Sequence[Record] = (),
    steps: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Comparison:
    """Compare a record with the reference.

    Args:
        reference: record of the run that is right, such as of one process.
        candidate: record of the other.
        noisy: records of the reference run again with noise in the last place, from which tolerances are learned.
        steps: number of steps to compare; all by default.
        advance: called after each step.

    Raises:
        UserError: the records are of different models or steps, or a file is damaged.
    """
    count = _steps(reference, candidate, noisy, steps)
    tolerances = Tolerances(_precision(reference, candidate))
    found = Comparison(steps=count)
    tolerances.runs = len(noisy)
    before: Quantities | None = None
    for step in range(count + 1):
        expected = reference.step(step)
        got = candidate.step(step)
        if step == 0:
            _check_model(reference, candidate, expected, got)
        for other in noisy:
            again = _Step(step, reference, other, expected, other.step(step), tolerances)
            again.learn()
        one = _Step(step, reference, candidate, expected, got, tolerances, before)
        one.compare(found)
        before = expected
        advance()
    found.departures.sort(key=lambda each: (each.step, phase_of(each)))  # stable: within a phase, in its order
    _note(found, reference, candidate)
    return found


def phase_of(departure: Departure) -> int:
    """Return the place of a departure's kind in a step."""
    return PHASES.index(_without_key(departure.kind))


def _without_key(kind: str) -> str:
    return STATE if kind.startswith(STATE) else kind


def _steps(reference: Record, candidate: Record, noisy: Sequence[Record], wanted: int | None) -> int:
    have = min(each.steps for each in (reference, candidate, *noisy))
    if wanted is not None and wanted > have:
        raise UserError(f"--steps {wanted} but the records have {have} in common; use {have}.")
    if wanted is None:
        for record in (reference, candidate, *noisy):
            planned = record.facts.get("planned_steps", 0)
            if record.steps < planned:
                short = min(record.ranks, key=lambda facts: facts["steps"])
                raise UserError(
                    f"The record {shown(record.folder)} is cut: rank {short['rank']} recorded {short['steps']} of "
                    f"{planned} steps; record the run to their end, or compare fewer: --steps {max(record.steps, 1)}."
                )
        if reference.steps != candidate.steps:
            raise UserError(
                f"The records have {reference.steps} and {candidate.steps} steps; compare what both have with "
                f"--steps {have}."
            )
    if have < 1:
        raise UserError("The records have no step in common; record at least one step of each run.")
    return wanted or have


def _check_model(reference: Record, candidate: Record, expected: Quantities, got: Quantities) -> None:
    names = {name: each.kept.shape for (kind, name, _), each in expected.items() if kind == INITIAL}
    others = {name: each.kept.shape for (kind, name, _), each in got.items() if kind == INITIAL}
    lacking = sorted(set(names) - set(others))
    extra = sorted(set(others) - set(names))
    which = f"{shown(candidate.folder)} is of another model than {shown(reference.folder)}"
    remedy = "compare runs of one model, or let the adapter return the names of the whole one"
    if lacking or extra:
        what = f"it lacks {lacking[0]}" if lacking else f"it has {extra[0]}, which the reference has not"
        more = len(lacking) + len(extra) - 1
        raise UserError(f"The record {which}: {what}{f' ({more} more names differ)' if more else ''}; {remedy}.")
    for name, shape in names.items():
        if shape != others[name]:
            raise UserError(f"The record {which}: {name} has the shape {others[name]} instead of {shape}; {remedy}.")
    for (kind, name, _), each in got.items():
        if kind == INITIAL and each.missing:
            raise UserError(
                f"The record {shown(candidate.folder)} has {each.kept.covered:,} elements of {name}, and "
                f"{each.missing:,} are missing; let every rank record, and the adapter place all its parts."
            )


def _precision(*records: Record) -> str:
    dtypes = {dtype for record in records for facts in record.ranks for dtype in facts["dtypes"]}
    dtypes |= {dtype for record in records for facts in record.ranks for dtype in facts.get("activation_dtypes", ())}
    for name in ("bfloat16", "float16", "float32"):
        if name in dtypes:
            return name
    return "float64"


class _Step:
    """A step of two records, compared kind by kind."""

    def __init__(
        self,
        step: int,
        reference: Record,
        candidate: Record,
        expected: Quantities,
        got: Quantities,
        tolerances: Tolerances,
        before: Quantities | None = None,
    ) -> None:
        self.step, self.reference, self.candidate = step, reference, candidate
        self.expected, self.got, self.tolerances, self.before = expected, got, tolerances, before
        self.least = least_magnitudes(expected.values())
        self.factors = Factors.of_run(candidate.facts, max(step, 1), reference.facts)
        self.mine = self._numbers(candidate)
        self.theirs = self._numbers(reference)

    def _numbers(self, record: Record) -> list[dict[str, Any]]:
        return [facts["numbers"].get(str(self.step), {}) for facts in record.ranks] if self.step else []

    def learn(self) -> None:
        """Take up the differences to a run with noise as rounding."""
        factors = self._sample_factors()
        for key, reference in self.expected.items():
            other = self.got.get(key)
            if other is not None and not reference.missing and not other.missing:
                seen = self._measure(other, reference, factors)
                self.tolerances.learn(self.step, reference.kind, reference.name, seen)
        for name, value, got in self._pairs_of_numbers():
            self.tolerances.learn(self.step, NUMBER, name, Measure(_off(got, value), nan))

    def compare(self, found: Comparison) -> None:
        """Add what departs at this step."""
        add = found.departures.append
        for each in self._tensors(found):
            add(each)
        if self.step:
            for each in self._samples():
                add(each)
            for each in self._scalars(found):
                add(each)
            for each in self._counters(found):
                add(each)
        if self.step == 1:
            outputs = sorted({(each.order, each.name) for each in self.expected.values() if each.kind == OUTPUT})
            found.order = list(dict.fromkeys(name for _, name in outputs))

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def _measure(self, got: Quantity, reference: Quantity, factors: dict[str, float]) -> Measure:
        scale = factors.get(reference.sample, 1.0) if reference.kind == INPUT_GRADIENT else 1.0
        return measure(got.kept, reference.kept, self.least.get(reference.kind, 0.0), scale)

    def _sample_factors(self) -> dict[str, float]:
        """Return, by sample, the factor of the gradient where the backward pass begins.

        Ranks and micro-batches scale their losses differently and make up for it when they sum gradients, so input
        gradients are compared relative to the first. Whether the sum is right, the gradients of parameters show.
        """
        found: dict[str, tuple[int, float]] = {}
        for key, reference in self.expected.items():
            if reference.kind != INPUT_GRADIENT or (got := self.got.get(key)) is None:
                continue
            if reference.sample in found and found[reference.sample][0] <= reference.order:
                continue
            if got.missing or reference.missing or got.kept.shape != reference.kept.shape:
                continue
            scale = measure(got.kept, reference.kept, 0.0).scale
            if isfinite(scale) and scale:
                found[reference.sample] = reference.order, scale
        return {sample: scale for sample, (_, scale) in found.items()}

    def _tensors(self, found: Comparison) -> Iterator[Departure]:
        factors = self._sample_factors()
        ordered = sorted(self.expected.items(), key=lambda item: item[1].order)
        groups: dict[tuple[str, str], list[tuple[Quantity, Quantity | None]]] = {}
        for key, reference in ordered:
            groups.setdefault((reference.kind, reference.name), []).append((reference, self.got.get(key)))
        for (kind, name), pairs in groups.items():
            compared = [(ours, other) for ours, other in pairs if other is not None]
            if (
                not compared
                and kind in (GRADIENT, UPDATE, BUFFER)
                and any(each.kept.elements.any() for each, _ in pairs)
            ):
                yield Departure(self.step, kind, name, 1.0, 0.0, 0.0, "is missing")
                continue
            tolerance = self.tolerances.of(self.step, kind, name)
            if kind == INITIAL:
                tolerance = Tolerance(_SAME, _SAME)
            yield from self._group(found, kind, name, compared, tolerance, factors)

    def _group(
        self,
        found: Comparison,
        kind: str,
        name: str,
        pairs: list[tuple[Quantity, Quantity]],
        tolerance: Tolerance,
        factors: dict[str, float],
    ) -> Iterator[Departure]:
        worst: tuple[float, Measure, Quantity, Quantity] | None = None
        departing = 0
        for reference, other in pairs:
            if other.missing or reference.missing or other.kept.shape != reference.kept.shape:
                continue
            found.compared[kind] = found.compared.get(kind, 0) + 1
            seen = self._measure(other, reference, factors)
            ratio = max(seen.error / tolerance.error, seen.off / tolerance.scale)
            departing += ratio > 1
            if worst is None or ratio > worst[0]:
                worst = ratio, seen, reference, other
        if worst is None:
            return
        ratio, seen, reference, other = worst
        key = self.step, kind, name
        total = self.step, _without_key(kind)
        found.totals[total] = found.totals.get(total, 0) + 1
        found.worst[key] = max(found.worst.get(key, 0.0), ratio)
        copies = self._copies(other, tolerance) if kind not in (OUTPUT, INPUT_GRADIENT) else None
        if ratio > 1:
            shape = self._shape(other, reference, tolerance, factors) or (copies[1] if copies else "")
            where = self._where(other, reference, departing, len(pairs))
            yield Departure(
                self.step, kind, name, seen.error, tolerance.error, seen.scale, shape, where, copies is not None
            )
        elif copies:
            found.worst[key] = max(found.worst[key], copies[0] / tolerance.error)
            yield Departure(self.step, kind, name, copies[0], tolerance.error, nan, copies[1], copies[2], True)

    def _shape(self, got: Quantity, reference: Quantity, tolerance: Tolerance, factors: dict[str, float]) -> str:
        scale = factors.get(reference.sample, 1.0) if reference.kind == INPUT_GRADIENT else 1.0
        kept = got.kept
        if scale != 1.0:
            projections = [each / scale for each in kept.projections]
            kept = type(kept)(kept.shape, kept.detail, kept.squares, projections, kept.elements / scale, kept.covered)
        if text := shape_of(kept, reference.kept, self.factors, tolerance.error):
            return text
        if copies := self._reduced(got, reference, tolerance):
            return copies
        if self.before is not None and reference.kind in (GRADIENT, UPDATE):
            last = self.before.get((reference.kind, reference.name, reference.sample))
            if last is not None and measure(kept, last.kept).error < 3 * tolerance.error:
                return f"is the one of step {self.step - 1}"
            if last is not None:
                both = [a + b for a, b in zip(reference.kept.projections, last.kept.projections, strict=True)]
                elements = reference.kept.elements + last.kept.elements
                total = type(kept)(kept.shape, kept.detail, nan, both, elements, kept.covered)
                if measure(kept, total).error < 3 * tolerance.error:
                    return f"has the one of step {self.step - 1} added"
        return ""

    def _reduced(self, got: Quantity, reference: Quantity, tolerance: Tolerance) -> str:
        """Return what the ranks' different copies make together, if that is the reference."""
        whole = [(entry, values) for _, entry, values in got.copies if entry.size == reference.kept.shape]
        if not whole:
            return ""
        shares = []
        first = None
        for entry, values in whole:
            copy, mine = copy_elements(got.kept, entry, values)
            _, expected = copy_elements(reference.kept, entry, values)
            shares.append(copy)
            first = first if first is not None else (mine, expected)
        assert first is not None
        mine, expected = first
        if any(len(each) != len(mine) for each in shares):
            return ""
        total = mine + sum(shares)
        close = max(10 * tolerance.error, 1e-6)
        size = float(expected.norm())
        if not size or float((shares[0] - mine).norm()) < close * size:
            return ""
        if float((total / (len(shares) + 1) - expected).norm()) < close * size:
            return "is each rank's own share: their mean would be right"
        if float((total - expected).norm()) < close * size:
            return "is each rank's own share: their sum would be right"
        return ""

    def _copies(self, got: Quantity, tolerance: Tolerance) -> tuple[float, str, str] | None:
        """Return the error, the shape and the ranks of copies that differ from the first."""
        least = self.least.get(got.kind, 0.0)
        errors = {rank: copy_error(got.kept, entry, values, least) for rank, entry, values in got.copies}
        departing = {rank: error for rank, error in errors.items() if not error <= max(tolerance.error, 1e-6)}
        if not departing:
            return None
        owner = got.owners[0][1] if got.owners else 0
        ranks = sorted(departing)
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}"
        return max(departing.values()), f"differs between ranks that hold copies: {named} from rank {owner}", named

    def _where(self, got: Quantity, reference: Quantity, departing: int, count: int) -> str:
        if reference.sample and departing < count:
            return f"{departing} of {count} samples"
        if len(got.owners) < 2:
            return ""
        wrong = []
        for piece, rank in got.owners:
            box = _box(got, piece)
            a, b = got.kept.elements[box], reference.kept.elements[box]
            size = max(float(b.norm()), 0.1 * float(reference.kept.elements.norm()) / sqrt(len(got.owners)))
            tolerance = self.tolerances.of(self.step, reference.kind, reference.name)
            if a.numel() and float((a - b).norm()) > tolerance.error * size:
                wrong.append(rank)
        ranks = sorted(set(wrong))
        if not ranks or len(ranks) == len({rank for _, rank in got.owners}):
            return ""
        return (
            f"in the shard of rank {ranks[0]}"
            if len(ranks) == 1
            else f"in the shards of ranks {', '.join(map(str, ranks[:8]))}"
        )

    # ---- numbers ----------------------------------------------------------------------------------------------------

    def _samples(self) -> Iterator[Departure]:
        theirs = sorted({sample for each in self.theirs for sample in each.get("samples", ())})
        mine = sorted({sample for each in self.mine for sample in each.get("samples", ())})
        if not theirs or not mine or theirs == mine:
            return
        strange = [sample for sample in mine if sample not in set(theirs)]
        lacking = [sample for sample in theirs if sample not in set(mine)]
        shape = f"differ: {len(strange)} of {len(mine)} are not those of the reference"
        for other in range(1, self.reference.steps + 1):
            numbers = [facts["numbers"].get(str(other), {}) for facts in self.reference.ranks]
            if other != self.step and mine == sorted({s for each in numbers for s in each.get("samples", ())}):
                shape = f"are those of step {other} of the reference"
        if not strange:
            shape = f"are fewer: {len(lacking)} of {len(theirs)} are missing"
        yield Departure(self.step, SAMPLES, "", len(strange) / max(len(mine), 1), 0.0, nan, shape)

    def _pairs_of_numbers(self) -> Iterator[tuple[str, float, float]]:
        """Yield name, value in the reference and that of each rank, of numbers that every rank must report alike."""
        scalars = [each.get("scalars", {}) for each in self.mine]
        for name, text in (self.theirs[0].get("scalars", {}) if self.theirs else {}).items():
            if name == "loss":
                yield name, float(text), _nearest_loss(float(text), self.mine)
                continue
            for each in scalars:
                if name in each:
                    yield name, float(text), float(each[name])
        yield from self._norm()

    def _norm(self) -> Iterator[tuple[str, float, float]]:
        norms = []
        for quantities in (self.expected, self.got):
            squares = [each.kept.squares for each in quantities.values() if each.kind == GRADIENT and not each.missing]
            norms.append(sqrt(sum(squares)) if squares and not isnan(sum(squares)) else nan)
        if isfinite(norms[0]) and isfinite(norms[1]) and self.step:
            yield "norm of the recorded gradients", norms[0], norms[1]

    def _scalars(self, found: Comparison) -> Iterator[Departure]:
        worst: dict[str, tuple[float, float, float]] = {}
        for name, value, got in self._pairs_of_numbers():
            found.compared[NUMBER] = found.compared.get(NUMBER, 0) + 1
            off = _off(got, value)
            if name not in worst or off > worst[name][0]:
                worst[name] = off, value, got
        for name, (off, value, got) in worst.items():
            tolerance = self.tolerances.of(self.step, NUMBER, name).error
            if off <= tolerance or name == "norm of the recorded gradients":
                continue
            kind = {"loss": LOSS, "gradient norm": NORM, "clip factor": NORM}.get(name, NUMBER)
            factor = got / value if value else nan
            shape = f"is {got:.6g} instead of {value:.6g}"
            if isfinite(factor) and factor > 0:
                shape += f": {self.factors.name(factor)} times"
            yield Departure(self.step, kind, name, off, tolerance, factor, shape)

    def _counters(self, found: Comparison) -> Iterator[Departure]:
        theirs: dict[str, dict[str, float]] = {}
        for each in self.theirs:
            theirs |= each.get("counters", {})
        departing: dict[tuple[str, str], dict[int, float]] = {}
        for rank, each in enumerate(self.mine):
            for name, counters in each.get("counters", {}).items():
                for key in set(counters) & set(theirs.get(name, {})):
                    held = departing.setdefault((key, name), {})
                    if _off(float(counters[key]), float(theirs[name][key])) > _SAME:
                        held[rank] = float(counters[key])
        found.compared[RATE] = found.compared.get(RATE, 0) + len(departing)
        found.totals[self.step, RATE] = len(departing)
        for (key, name), ranks in departing.items():
            if not ranks:
                continue
            rank, value = next(iter(ranks.items()))
            expected = float(theirs[name][key])
            shape = f"is {value:.6g} instead of {expected:.6g}"
            for other in range(1, self.reference.steps + 1):
                numbers = self.reference.facts["numbers"].get(str(other), {}).get("counters", {})
                if other != self.step and numbers.get(name, {}).get(key) == value:
                    shape += f", the one of step {other}"
                    break
            where = "" if len(ranks) == len(self.mine) else f"on rank {rank}"
            yield Departure(self.step, RATE, f"{key} of {name}", _off(value, expected), _SAME, nan, shape, where)


def _box(got: Quantity, piece: Any) -> Any:
    from threefold.parity.sketch import grid

    ranges = []
    for index, start, size in zip(grid(got.kept.shape, got.kept.detail), piece.start, piece.size, strict=True):
        inside = ((index >= start) & (index < start + size)).nonzero()[:, 0]
        ranges.append(slice(int(inside[0]), int(inside[-1]) + 1) if len(inside) else slice(0, 0))
    return tuple(ranges)


def _off(got: float, expected: float) -> float:
    if isnan(got) or isnan(expected):
        return 0.0 if isnan(got) and isnan(expected) else float("inf")
    return abs(got - expected) / (abs(expected) or 1.0) if got != expected else 0.0


def _nearest_loss(expected: float, ranks: list[dict[str, Any]]) -> float:
    """Return the ranks' losses as one number: all alike, their mean, weighted mean or sum, whichever is nearest.

    Ranks may report the mean over all samples, over their own, or their share of a sum; a rank without a loss, as on an
    early pipeline stage, reports none.
    """
    reported = [
        (float(each["scalars"]["loss"]), each.get("valid_tokens", 0))
        for each in ranks
        if "loss" in each.get("scalars", {})
    ]
    if not reported:
        return nan
    losses = [loss for loss, _ in reported]
    total = sum(losses)
    ways = [total / len(losses), total]
    if weights := sum(tokens for _, tokens in reported):
        ways.append(sum(loss * tokens for loss, tokens in reported) / weights)
    if max(losses) - min(losses) <= 1e-6 * abs(max(losses)):
        ways = [losses[0], total] if len(losses) > 1 else [losses[0]]
    return min(ways, key=lambda way: _off(way, expected))


def _note(found: Comparison, reference: Record, candidate: Record) -> None:
    if found.first is not None and any(
        numbers.get("drew_random_numbers") for facts in candidate.ranks for numbers in facts["numbers"].values()
    ):
        found.notes.append(
            "The forward pass draws random numbers (dropout?), which ranks draw differently in most frameworks: "
            "compare with dropout 0 first."
        )
    if OUTPUT not in found.compared:
        found.notes.append("No module's output was recorded by both, so that only parameters tell where it begins.")
    versions = [record.facts["versions"] for record in (reference, candidate)]
    for name in sorted(set(versions[0]) & set(versions[1])):
        if versions[0][name] != versions[1][name]:
            found.notes.append(
                f"The runs have different versions of {name}: {versions[0][name]} and {versions[1][name]}."
            )
    if any(len(record.ranks) > 1 for record in (reference,)):
        found.notes.append(f"The reference has {len(reference.ranks)} ranks itself.")

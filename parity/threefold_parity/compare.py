"""Comparison of two records: every quantity that departs, and where the departure begins.

Quantities are taken in the order in which a step computes them: initial weights, samples, outputs in the order of the
forward pass, loss, output gradients in that of the backward pass, gradients, their norm, learning rates, updates,
optimizer states, buffers. The first quantity that departs is at the mistake, or directly after it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf, isfinite, isnan, nan, sqrt
from typing import Any, Final

from threefold_parity.departure import LOSS, NORM, NUMBER, RATE, SAME, SAMPLES, Departure, Findings, phase_of
from threefold_parity.measure import Measure, Quantities, Tolerances, last_places
from threefold_parity.mistake import NOT_FINITE
from threefold_parity.record import GRADIENT, INITIAL, OUTPUT, Record, align
from threefold_parity.tensors import StepPair, TensorStep
from threefold_parity.text import UserError, first_of, shown

PRECISIONS: Final = ("bfloat16", "float16", "float32")
"""Dtypes below fp64, the lowest first."""


def compare(
    reference: Record,
    candidate: Record,
    noisy: Sequence[Record] = (),
    steps: int | None = None,
    wide: Record | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Findings:
    """Compare a record with the reference.

    Args:
        noisy: records of the reference, run again with noise in the last place, to learn tolerances.
        steps: number of steps to compare; all by default.
        wide: record of the reference run again in fp64, whose first step says how large rounding is.
        advance: called after each step.

    Raises:
        UserError: the records are of different models or steps, or a file is damaged.
    """
    for other in noisy:
        if not other.facts.get("perturbed"):
            raise UserError(
                f"--noise {shown(other.folder)} is a run without noise, so that it shows no rounding; give records of "
                "the reference run with THREEFOLD_PARITY_PERTURB, as parity run --out keeps them."
            )
    if wide is not None and not noisy:
        raise UserError("--wide goes with --noise; give records of the reference with noise, too.")
    if wide is not None and (problem := wide_problem(reference, wide)):
        raise UserError(f"--wide {shown(wide.folder)} is of no use: {problem}; leave it out.")
    count = _steps(reference, candidate, noisy, steps)
    tolerances = Tolerances(_precision(reference, candidate), len(noisy))
    found = Findings(steps=count)
    before: Quantities | None = None
    places: dict[str, float] = {}
    for step in range(count + 1):
        expected, got = reference.step(step), candidate.step(step)
        if step == 0:
            _check_model(reference, candidate, expected, got)
            ranks = (*reference.ranks, *candidate.ranks)
            dtypes = (item for facts in ranks for item in facts.get("weight_dtypes", {}).items())
            places = last_places(expected.values(), dtypes)
        repeated = [other.step(step) for other in noisy]
        if wide is not None and step == 1:
            in_fp64 = wide.step(step)
            align([expected, got, *repeated, in_fp64])
            TensorStep(step, reference, wide, expected, in_fp64, tolerances).learn(wide=True)
        align([expected, got, *repeated])
        for other, again in zip(noisy, repeated, strict=True):
            if step == 0:
                _check_model(reference, other, expected, again)
            learned = step, reference, other, expected, again, tolerances
            TensorStep(*learned, places=places).learn()
            if step:
                ReportedStep(*learned).learn()
        if step and (names := _matched_without_padding(_numbers(reference, step), _numbers(candidate, step))):
            found.padded = True
            got = {
                (kind, name, names.get(sample, sample)): replace(each, sample=names.get(sample, sample))
                for (kind, name, sample), each in got.items()
            }
        pair = step, reference, candidate, expected, got, tolerances
        found.departures += TensorStep(*pair, before, places).compare(found)
        if step:
            reported = ReportedStep(*pair)
            found.departures += reported.compare(found)
            found.shares |= reported.loss[1]
        if step == 1:
            outputs = sorted({(each.order, each.name) for each in expected.values() if each.kind == OUTPUT})
            found.order = list(dict.fromkeys(name for _, name in outputs))
        before = expected
        advance()
    found.departures.sort(key=lambda each: (each.step, phase_of(each)))  # stable: within a phase, in its order
    _note(found, reference, candidate)
    return found


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
    for record, quantities in ((reference, expected), (candidate, got)):
        for (kind, name, _), each in quantities.items():
            if kind == INITIAL and each.missing:
                raise UserError(
                    f"The record {shown(record.folder)} has {each.kept.covered:,} elements of {name}, and "
                    f"{each.missing:,} are missing; let every rank record, and the adapter place all its parts."
                )


def wide_problem(reference: Record, wide: Record) -> str:
    """Return why a record cannot be the reference's in fp64, as a clause; empty if it can."""
    if not wide.facts.get("wide"):
        return "it was recorded without THREEFOLD_PARITY_WIDE"
    if any(facts["numbers"].get("1", {}).get("drew_random_numbers") for facts in reference.ranks):
        return "the reference draws random numbers (dropout?), in fp64 others"
    narrow, widened = _precision(reference), _precision(wide)
    order = (*PRECISIONS, "float64")
    if order.index(widened) <= order.index(narrow) and narrow != "float64":
        return f"the model computes in {widened} in spite of fp64 weights and inputs"
    return ""


def _precision(*records: Record) -> str:
    ranks = (facts for record in records for facts in record.ranks)
    dtypes = {dtype for facts in ranks for dtype in (*facts.get("dtypes", ()), *facts.get("activation_dtypes", ()))}
    return next((name for name in PRECISIONS if name in dtypes), "float64")


def _note(found: Findings, reference: Record, candidate: Record) -> None:
    pair = reference, candidate
    found.epoch_steps, found.after = reference.facts.get("epoch_steps", 0), reference.facts.get("after", 0)
    if found.departures and any(
        numbers.get("drew_random_numbers") for facts in candidate.ranks for numbers in facts["numbers"].values()
    ):
        found.notes.append(
            "The forward pass draws random numbers (dropout?), which ranks draw differently in most frameworks: "
            "compare with dropout 0 first."
        )
    if OUTPUT not in found.compared:
        found.notes.append("No module's output was recorded by both, so that only parameters tell where it begins.")
    if found.loose:
        found.notes.append(
            f"Rounding is as large as much of {first_of(sorted(found.loose), 1)}: there only factors and large "
            "mistakes show; compare fewer steps, or in a higher precision."
        )
    if found.skipped and OUTPUT in found.compared:
        found.notes.append(
            f"Outputs of {first_of(sorted(found.skipped), 1, 'modules')} were not compared everywhere: a "
            "record lacks them, or has them in parts, in other shapes or for other samples; an adapter may place them."
        )
    ours, theirs = (record.facts.get("versions", {}) for record in (reference, candidate))
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name]:
            found.notes.append(f"The runs have different versions of {name}: {ours[name]} and {theirs[name]}.")
    if found.padded:
        found.notes.append(
            "Samples were matched without their padding, whose length differs between the runs, and outputs and their "
            "gradients compared at the positions that are no padding."
        )
    if any(each.kind == SAMPLES for each in found.departures) and not found.padded:
        steps = range(1, found.steps + 1)
        lengths = [{tuple(each.get("lengths", ())) for at in steps for each in _numbers(record, at)} for record in pair]
        if lengths[0] != lengths[1]:
            found.notes.append(
                "The rows have other lengths in the two runs: if batches are padded, give recorder.batch the labels or "
                "the attention mask, so that samples are matched without their padding."
            )
    if found.shares:
        found.notes.append(
            "The candidate's ranks report shares of the loss, and their sum was compared: a log of one rank's number "
            "would be too small."
        )
    if len(reference.ranks) > 1:
        found.notes.append(f"The reference has {len(reference.ranks)} ranks itself.")


class ReportedStep(StepPair):
    """Reported numbers of one step of two records."""

    @cached_property
    def mine(self) -> list[dict[str, Any]]:
        return _numbers(self.candidate, self.step)

    @cached_property
    def theirs(self) -> list[dict[str, Any]]:
        return _numbers(self.reference, self.step)

    @cached_property
    def loss(self) -> tuple[float, bool]:
        """The candidate's loss, and whether it is a sum of the ranks' shares."""
        ranks = ((now, *facts["numbers"].values()) for now, facts in zip(self.mine, self.candidate.ranks, strict=True))
        return _nearest_loss(_loss(self.theirs[0]), list(ranks))

    def learn(self) -> None:
        for name, value, got in self._pairs_of_numbers():
            self.tolerances.learn(self.step, NUMBER, name, Measure(_off(got, value), nan))

    def compare(self, found: Findings) -> Iterator[Departure]:
        """Yield the departures, and count the compared quantities in `found`."""
        yield from self._samples()
        yield from self._scalars(found)
        yield from self._counters(found)

    def _samples(self) -> Iterator[Departure]:
        if _samples_of(self.theirs) == _samples_of(self.mine) or _matched_without_padding(self.theirs, self.mine):
            return
        theirs, mine = set(_contents(self.theirs)), set(_contents(self.mine))
        if not theirs or not mine:
            return
        strange, lacking = mine - theirs, theirs - mine
        others = {at: set(_contents(_numbers(self.reference, at))) for at in range(1, self.reference.steps + 1)}
        shape = f"differ: {len(strange)} of {len(mine)} are not those of the reference"
        if strange and strange <= set().union(*(others[at] for at in range(1, self.step))):
            shape = f"differ: {len(strange)} of {len(mine)} are repeated from steps before"
        if same := [at for at, samples in others.items() if at != self.step and samples == mine]:
            shape = f"are those of step {same[-1]} of the reference"
        if not strange:
            shape = f"are fewer: {len(lacking)} of {len(theirs)} are missing"
        yield Departure(self.step, SAMPLES, "", len(strange) / len(mine), 0.0, nan, shape)

    def _pairs_of_numbers(self) -> Iterator[tuple[str, float, float]]:
        """Yield name, value in the reference and value on each rank, for numbers that every rank must report alike."""
        for name, text in (self.theirs[0].get("scalars", {}) if self.theirs else {}).items():
            if name == "loss":
                yield name, float(text), self.loss[0]
                continue
            for each in self.mine:
                if name in each.get("scalars", {}):
                    yield name, float(text), float(each["scalars"][name])
        norms = []
        for quantities in (self.expected, self.got):
            squares = [each.kept.squares for each in quantities.values() if each.kind == GRADIENT and not each.missing]
            norms.append(sqrt(sum(squares)) if squares and not isnan(sum(squares)) else nan)
        if isfinite(norms[0]) and isfinite(norms[1]):
            yield "norm of the recorded gradients", norms[0], norms[1]

    def _scalars(self, found: Findings) -> Iterator[Departure]:
        worst: dict[str, tuple[float, float, float]] = {}
        for name, value, got in self._pairs_of_numbers():
            found.compared[NUMBER] += 1
            off = _off(got, value)
            if name not in worst or off > worst[name][0]:
                worst[name] = off, value, got
        for name, (off, value, got) in worst.items():
            tolerance = self.tolerances.of_number(self.step, name, value)
            if off <= tolerance or name == "norm of the recorded gradients":
                continue
            kind = {"loss": LOSS, "gradient norm": NORM, "clip factor": NORM}.get(name, NUMBER)
            factor = got / value if value else nan
            shape = f"is {got:.6g} instead of {value:.6g}"
            if not isfinite(value) and not isfinite(got):
                shape = NOT_FINITE
            elif isfinite(factor) and factor > 0 and abs(factor - 1) > 0.02:
                shape += f": {self.factors.name(factor)} times"
            yield Departure(self.step, kind, name, off, tolerance, factor, shape)

    def _counters(self, found: Findings) -> Iterator[Departure]:
        theirs: dict[str, dict[str, float]] = {}
        for each in self.theirs:
            theirs |= each.get("counters", {})
        departing: dict[tuple[str, str], dict[int, float]] = {}
        for rank, each in enumerate(self.mine):
            for name, counters in each.get("counters", {}).items():
                for key in set(counters) & set(theirs.get(name, {})):
                    held = departing.setdefault((key, name), {})
                    if _off(float(counters[key]), float(theirs[name][key])) > SAME:
                        held[rank] = float(counters[key])
        found.compared[RATE] += len(departing)
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
            yield Departure(self.step, RATE, f"{key} of {name}", _off(value, expected), SAME, nan, shape, where)


def _numbers(record: Record, step: int) -> list[dict[str, Any]]:
    return [facts["numbers"].get(str(step), {}) for facts in record.ranks]


def _samples_of(ranks: list[dict[str, Any]]) -> list[str]:
    return sorted({sample for each in ranks for sample in each.get("samples", ())})


def _matched_without_padding(theirs: list[dict[str, Any]], mine: list[dict[str, Any]]) -> dict[str, str]:
    """Return the reference's sample for each of the candidate's, if they are the same but for their padding."""
    if _samples_of(theirs) == _samples_of(mine):
        return {}
    expected, found = _contents(theirs), _contents(mine)
    return {sample: expected[own] for own, sample in found.items()} if expected.keys() == found.keys() else {}


def _contents(ranks: list[dict[str, Any]]) -> dict[str, str]:
    """Return the samples of a step by their fingerprints without padding."""
    known = {whole: own for each in ranks for whole, own in each.get("unpadded", {}).items()}
    return {known.get(sample, sample): sample for sample in _samples_of(ranks)}


def _off(got: float, expected: float) -> float:
    """Return the relative difference of two numbers; what is not finite equals nothing."""
    if not isfinite(got) or not isfinite(expected):
        return inf
    return abs(got - expected) / (abs(expected) or 1.0) if got != expected else 0.0


def _nearest_loss(expected: float, ranks: Sequence[tuple[Mapping[str, Any], ...]]) -> tuple[float, bool]:
    """Return the ranks' losses as one number, and whether it is the sum of shares that the ranks report.

    `ranks` are the numbers of each rank, in this step and in all. The number is that of all ranks if they report the
    same in every step; or their mean, weighted mean or sum, whichever is nearest. Ranks may report the mean over all
    samples, over their own, or their share of a sum; a rank without a loss, as on an early pipeline stage, reports
    none.
    """
    ranks = [each for each in ranks if "loss" in each[0].get("scalars", {})]
    if not ranks:
        return nan, False
    reported = [(_loss(now), now.get("valid_tokens", 0), now.get("samples", ())) for now, *_ in ranks]
    losses = [loss for loss, *_ in reported]
    steps = ([_loss(each) for each in step] for step in zip(*ranks, strict=False))
    if all(_are_alike(each) for each in steps if all(map(isfinite, each))):
        return losses[0], False
    distinct: list[tuple[float, Any]] = []  # tensor-parallel ranks repeat the share of their samples
    for loss, _, samples in reported:
        if not any(samples == other and _are_alike([loss, known]) for known, other in distinct):
            distinct.append((loss, samples))
    ways = [(sum(losses) / len(losses), False), (sum(loss for loss, _ in distinct), True)]
    if weights := sum(tokens for _, tokens, _ in reported):
        ways.append((sum(loss * tokens for loss, tokens, _ in reported) / weights, False))
    return min(ways, key=lambda way: _off(way[0], expected))


def _loss(numbers: Mapping[str, Any]) -> float:
    return float(numbers.get("scalars", {}).get("loss", nan))


def _are_alike(losses: Sequence[float]) -> bool:
    return max(losses) - min(losses) <= 1e-6 * max(map(abs, losses))

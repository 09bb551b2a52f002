"""Comparison of the numbers that ranks report at a step: samples, losses and other numbers, learning rates."""

from collections.abc import Iterator
from functools import cached_property
from math import isfinite, isnan, nan, sqrt
from typing import Any

from threefold.parity.departure import LOSS, NORM, NUMBER, RATE, SAME, SAMPLES, Departure, Findings
from threefold.parity.measure import Measure
from threefold.parity.record import GRADIENT, Record
from threefold.parity.tensors import StepPair


class ReportedStep(StepPair):
    """Reported numbers of one step of two records."""

    @cached_property
    def mine(self) -> list[dict[str, Any]]:
        return _numbers(self.candidate, self.step)

    @cached_property
    def theirs(self) -> list[dict[str, Any]]:
        return _numbers(self.reference, self.step)

    def learn(self) -> None:
        """Learn the differences from a run with noise as rounding."""
        for name, value, got in self._pairs_of_numbers():
            self.tolerances.learn(self.step, NUMBER, name, Measure(_off(got, value), nan))

    def compare(self, found: Findings) -> Iterator[Departure]:
        """Yield the departures, and count the compared quantities in `found`."""
        yield from self._samples()
        yield from self._scalars(found)
        yield from self._counters(found)

    def _samples(self) -> Iterator[Departure]:
        theirs, mine = _samples_of(self.theirs), _samples_of(self.mine)
        if not theirs or not mine or theirs == mine:
            return
        strange, lacking = set(mine) - set(theirs), set(theirs) - set(mine)
        shape = f"differ: {len(strange)} of {len(mine)} are not those of the reference"
        for other in range(1, self.reference.steps + 1):
            if other != self.step and mine == _samples_of(_numbers(self.reference, other)):
                shape = f"are those of step {other} of the reference"
        if not strange:
            shape = f"are fewer: {len(lacking)} of {len(theirs)} are missing"
        yield Departure(self.step, SAMPLES, "", len(strange) / len(mine), 0.0, nan, shape)

    def _pairs_of_numbers(self) -> Iterator[tuple[str, float, float]]:
        """Yield name, value in the reference and value on each rank, for numbers that every rank must report alike."""
        for name, text in (self.theirs[0].get("scalars", {}) if self.theirs else {}).items():
            if name == "loss":
                yield name, float(text), _nearest_loss(float(text), self.mine)
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
            if isfinite(factor) and factor > 0 and abs(factor - 1) > 0.02:
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
    """Return the numbers of each rank."""
    return [facts["numbers"].get(str(step), {}) for facts in record.ranks]


def _samples_of(ranks: list[dict[str, Any]]) -> list[str]:
    return sorted({sample for each in ranks for sample in each.get("samples", ())})


def _off(got: float, expected: float) -> float:
    if isnan(got) or isnan(expected):
        return 0.0 if isnan(got) and isnan(expected) else float("inf")
    return abs(got - expected) / (abs(expected) or 1.0) if got != expected else 0.0


def _nearest_loss(expected: float, ranks: list[dict[str, Any]]) -> float:
    """Return the ranks' losses as one number: all alike, their mean, weighted mean or sum, whichever is nearest.

    Ranks may report the mean over all samples, over their own, or their share of a sum; a rank without a loss, as on an
    early pipeline stage, reports none.
    """
    ranks = [each for each in ranks if "loss" in each.get("scalars", {})]
    reported = [(float(each["scalars"]["loss"]), each.get("valid_tokens", 0)) for each in ranks]
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

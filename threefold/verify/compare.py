"""Comparison of one rank's part of a layout with one process: a relative error for everything that is computed.

Used by `threefold verify` and the tests, each with their own tolerances.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, isnan, prod

from torch import Tensor

from threefold.comm.layout import Layout
from threefold.verify.reference import Trace

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}
"""Largest relative error that counts as rounding, by dtype."""
SMALL = 1e-3
"""Share of the model's largest magnitude; a tensor that stays below it is measured against it."""

INITIAL, LOSS, GRADIENT, NORM, WEIGHT = "initial weight", "loss", "gradient", "gradient norm", "weight"
BUFFER, EVALUATION, CLIPPED, SCALE = "buffer", "evaluation loss", "clipped gradient", "loss scale"
AVERAGE = "averaged weight"
EVALUATED, CONSUMED, UPDATES, EXPORTED = "evaluated tokens", "samples consumed", "count of updates", "exported weight"
"""Kinds of compared quantities, beside those of `Trace.reported`."""


@dataclass(frozen=True)
class Held:
    """Part of a parameter that a rank holds: its pipeline stage, and its offset and shape within the whole, per dim."""

    name: str
    stage: int
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of the whole tensor, as a view."""
        for dim, (start, size) in enumerate(zip(self.start, self.shape, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


@dataclass(frozen=True)
class Error:
    """Deviation of one quantity from the single process.

    Attributes:
        what: kind of the quantity, such as `GRADIENT`.
        parameter: name of the parameter or buffer; empty for a number of the step.
        step: from 1; 0 for the initial weights.
        relative: difference relative to the largest magnitude in the whole tensor.
        dp, tp, pp, cp: coordinates of the rank, once `verifier.judge` has located it.
        stage: pipeline stage of the parameter; for a loss or norm, the rank's pp coordinate.
        check: check of the second run that saw it (`rank_worker.CHECKS`); empty for the first run.
    """

    what: str
    parameter: str
    step: int
    relative: float
    rank: int
    dp: int = 0
    tp: int = 0
    pp: int = 0
    cp: int = 0
    stage: int = 0
    check: str = ""

    def __str__(self) -> str:
        """Format as `gradient of blocks.0.mlp.up.weight, step 1`, with the check of the second run that saw it."""
        of = f" of {self.parameter}" if self.parameter else ""
        seen = f" in the check of {self.check}" if self.check else ""
        return f"{self.what}{of}" + (f", step {self.step}" if self.step else "") + seen

    @property
    def short(self) -> str:
        """Short form for the table: `step 1 grad blocks.0.mlp.up.weight`."""
        what = {INITIAL: "init", GRADIENT: "grad", NORM: "grad norm", CLIPPED: "clipped"}.get(self.what, self.what)
        when = f"{self.check}:" if self.check else f"step {self.step}" if self.step else ""
        return " ".join(part for part in (when, what, self.parameter) if part)

    def where(self, layout: Layout) -> str:
        """Format the coordinates on the axes of the layout: `stage 1, tp shard 0 of 2, rank 2`."""
        parts = [f"stage {self.stage}"] if layout.pp > 1 else []
        parts += [
            f"{name} {getattr(self, axis)} of {layout.size(axis)}"
            for axis, name in (("tp", "tp shard"), ("dp", "dp replica"), ("cp", "cp part"))
            if layout.size(axis) > 1
        ]
        return ", ".join([*parts, f"rank {self.rank}"])


class Comparison:
    """Comparison of a rank's results with a trace, piece by piece.

    Args:
        expected: trace of one process; without `leverage`, weights are compared like gradients.
        held: this rank's part of each parameter.
        floor: a tensor whose magnitudes are all below this share of the model's largest is measured against that share;
            0 to measure each tensor against its own largest.

    Attributes:
        errors: errors of all comparisons so far.
        check: check of the second run that the next results belong to; empty in the first run.
    """

    def __init__(self, expected: Trace, held: Mapping[str, Held], rank: int, floor: float = SMALL) -> None:
        self.expected, self.held, self.rank, self.floor = expected, held, rank, floor
        self.errors: list[Error] = []
        self.check = ""

    def initial(self, weights: Mapping[str, Tensor]) -> None:
        self._tensors(INITIAL, 0, weights, self.expected.initial)

    def gradients(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Compare the complete, unclipped gradients of a step (from 0)."""
        self._tensors(GRADIENT, step + 1, gradients, self.expected.gradients[step])

    def clipped(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Compare the clipped gradients of a step (from 0)."""
        coefficient = self.expected.coefficients[step]
        expected = {name: gradient * coefficient for name, gradient in self.expected.gradients[step].items()}
        self._tensors(CLIPPED, step + 1, gradients, expected)

    def scalars(self, step: int, loss: float, norm: float) -> None:
        """Compare the mean loss and the gradient norm of a step (from 0)."""
        self.number(LOSS, step, loss, self.expected.losses[step])
        self.number(NORM, step, norm, self.expected.norms[step])

    def number(self, what: str, step: int, got: float, expected: float, parameter: str = "") -> None:
        """Compare a number of a step (from 0)."""
        self._add(what, parameter, step + 1, abs(got - expected) / (abs(expected) or 1.0))

    def reported(self, step: int, numbers: Mapping[str, float]) -> None:
        """Compare the numbers that a run logs of a step (from 0), by kind."""
        for what, got in numbers.items():
            self.number(what, step, got, self.expected.reported[step][what])

    def updates(self, step: int, counts: Mapping[str, Tensor]) -> None:
        """Compare the counts of updates in the optimizer state after a step (from 0), by parameter."""
        for name, count in counts.items():
            self.number(UPDATES, step, float(count), self.expected.updates[step], name)

    def exported(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        leverage: Mapping[str, Tensor],
    ) -> None:
        """Compare whole weights, read back from an export of those after a step (from 0); missing ones depart."""
        for name, whole in expected.items():
            got, allowance = weights.get(name), leverage.get(name, 0.0) + (largest(whole) or 1.0)
            relative = inf
            if got is not None and got.shape == whole.shape:
                relative = largest((got - whole) / allowance)
            self._add(EXPORTED, name, step + 1, relative)

    def weights(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Compare the weights after the update of a step (from 0).

        Errors are relative to the tensor's largest magnitude plus the effect of a gradient error (`Trace.leverage`).
        """
        self._weights(WEIGHT, step, weights, self.expected.weights[step])

    def averages(self, step: int, averages: Mapping[str, Tensor]) -> None:
        """Compare the moving averages of the weights after a step (from 0), as the weights."""
        if averages or self.expected.averages:
            self._weights(AVERAGE, step, averages, self.expected.averages[step])

    def _weights(self, what: str, step: int, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        for held, part, whole, scale in self._pairs(got, expected):
            leverage = self.expected.leverage.get(held.name)
            allowance = scale if leverage is None else held.of(leverage) + scale
            self._add(what, held.name, step + 1, largest((part - held.of(whole)) / allowance))

    def buffers(self, step: int, buffers: Mapping[str, Tensor]) -> None:
        """Compare the persistent buffers after a step (from 0), which every rank holds whole."""
        for name, got in buffers.items():
            expected = self.expected.buffers[step].get(name)
            if expected is not None and expected.is_floating_point() and expected.shape == got.shape:
                same = got.isinf() & (got == expected)  # a mask may contain infinities
                parts = got.masked_fill(same, 0.0), expected.masked_fill(same, 0.0)
                self._add(BUFFER, name, step + 1, relative_error(*parts))

    def _tensors(self, what: str, step: int, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        for held, part, whole, scale in self._pairs(got, expected):
            self._add(what, held.name, step, relative_error(part, held.of(whole), scale))

    def _pairs(
        self, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]
    ) -> Iterator[tuple[Held, Tensor, Tensor, float]]:
        """Yield each held part, its value, the whole expected tensor, and the magnitude to measure by."""
        least = self.floor * max(largest(tensor) for tensor in expected.values()) if self.floor else 0.0
        for name, part in got.items():
            if name in expected:
                yield self.held[name], part, expected[name], max(largest(expected[name]), least) or 1.0

    def _add(self, what: str, parameter: str, step: int, relative: float) -> None:
        relative = inf if isnan(relative) else relative
        self.errors.append(Error(what, parameter, step, relative, self.rank, check=self.check))


def coverage(ranks: list[list[Held]], expected: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return a clause about elements of `expected` shapes that the ranks lack or hold in excess; None without any."""
    parts = {
        name: {(held.start, held.shape) for rank in ranks for held in rank if held.name == name} for name in expected
    }
    foreign = sorted({held.name for rank in ranks for held in rank} - set(expected))
    if foreign:
        return f"the ranks hold {foreign[0]}, which the whole model does not have"
    for name, shape in expected.items():
        elements = sum(prod(size) for _, size in parts[name])
        if elements != prod(shape):
            return f"the ranks together hold {elements:,} different elements of {name}, which has {prod(shape):,}"
    return None


def relative_error(got: Tensor, expected: Tensor, scale: float | None = None) -> float:
    """Return the largest difference relative to `scale`, by default the largest expected magnitude, or else 1."""
    return largest(got - expected) / (scale or largest(expected) or 1.0)


def largest(tensor: Tensor) -> float:
    """Return the magnitude of the largest element; 0 for an empty tensor."""
    return tensor.abs().max().item() if tensor.numel() else 0.0

"""Compares one rank's part of a layout with one process: a relative error for everything that is computed.

`threefold verify` and the tests compare with this, each with their own tolerances."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, isnan, prod

from torch import Tensor

from threefold.verify.reference import Trace

TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}
"""The largest relative error that still counts as rounding."""
SMALL = 1e-3
"""A tensor whose magnitudes are all below this share of the model's largest is measured against that share."""

INITIAL, LOSS, GRADIENT, NORM, WEIGHT = "initial weight", "loss", "gradient", "gradient norm", "weight"
BUFFER, EVALUATION, CLIPPED, SCALE = "buffer", "evaluation loss", "clipped gradient", "loss scale"
"""What is compared."""


@dataclass(frozen=True)
class Held:
    """The part of a parameter that a rank has.

    Attributes:
        name: the parameter's, in the whole model.
        stage: the pipeline stage it is on.
        start, shape: of the part within the whole, per dim.
    """

    name: str
    stage: int
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """The part of the whole tensor, as a view."""
        for dim, (start, size) in enumerate(zip(self.start, self.shape, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


@dataclass(frozen=True)
class Error:
    """How far one thing is from what one process has.

    Attributes:
        what: `INITIAL`, `LOSS`, `GRADIENT`, `EVALUATION`, `NORM`, `CLIPPED`, `WEIGHT`, `BUFFER` or `SCALE`.
        parameter: its name, or that of a buffer; empty for the loss and the norm.
        step: from 1; 0 for the initial weights.
        rank: where it was seen.
        relative: the difference relative to the largest magnitude in the whole tensor.
        check: the check of the second run that it belongs to (`second_run`); empty for the first run.
    """

    what: str
    parameter: str
    step: int
    rank: int
    relative: float
    check: str = ""


class Comparison:
    """Compares what a rank computes with a trace, piece by piece.

    Args:
        expected: what one process computed; without `leverage`, weights are compared as gradients are.
        held: this rank's part of each parameter.
        rank: its number.
        floor: a tensor whose magnitudes are all below this share of the model's largest is measured against that
            share; 0 to measure each against its own largest.
        check: the check of the second run that what is compared belongs to.
    """

    def __init__(
        self, expected: Trace, held: Mapping[str, Held], rank: int, floor: float = SMALL, check: str = ""
    ) -> None:
        self.expected, self.held, self.rank, self.floor, self.check = expected, held, rank, floor, check
        self.errors: list[Error] = []

    def initial(self, weights: Mapping[str, Tensor]) -> None:
        """Compare the weights before the first step, each this rank's part."""
        self._tensors(INITIAL, 0, weights, self.expected.initial)

    def gradients(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Compare the gradients of a step (from 0), complete and before the clip."""
        self._tensors(GRADIENT, step + 1, gradients, self.expected.gradients[step])

    def clipped(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Compare the gradients of a step (from 0) after the clip."""
        coefficient = self.expected.coefficients[step]
        expected = {name: gradient * coefficient for name, gradient in self.expected.gradients[step].items()}
        self._tensors(CLIPPED, step + 1, gradients, expected)

    def scalars(self, step: int, loss: float, norm: float) -> None:
        """Compare the mean loss and the gradient norm of a step (from 0)."""
        self.number(LOSS, step, loss, self.expected.losses[step])
        self.number(NORM, step, norm, self.expected.norms[step])

    def number(self, what: str, step: int, got: float, expected: float) -> None:
        """Compare a number of a step (from 0)."""
        self._add(what, "", step + 1, abs(got - expected) / (abs(expected) or 1.0))

    def weights(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Compare the weights after the update of a step (from 0).

        An error is relative to the tensor's largest magnitude plus what an error of the gradients makes of itself in
        the optimizer (`Trace.leverage`).
        """
        for held, got, whole, scale in self._pairs(weights, self.expected.weights[step]):
            leverage = self.expected.leverage.get(held.name)
            allowance = scale if leverage is None else held.of(leverage) + scale
            self._add(WEIGHT, held.name, step + 1, largest((got - held.of(whole)) / allowance))

    def buffers(self, step: int, buffers: Mapping[str, Tensor]) -> None:
        """Compare the persistent buffers after a step (from 0), which every rank holds whole."""
        for name, got in buffers.items():
            expected = self.expected.buffers[step].get(name)
            if expected is not None and expected.is_floating_point() and expected.shape == got.shape:
                finite = expected.isfinite()  # a mask may be of infinite ones
                parts = got.masked_fill(~finite, 0.0), expected.masked_fill(~finite, 0.0)
                self._add(BUFFER, name, step + 1, relative_error(*parts))

    def _tensors(self, what: str, step: int, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        for held, part, whole, scale in self._pairs(got, expected):
            self._add(what, held.name, step, relative_error(part, held.of(whole), scale))

    def _pairs(
        self, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]
    ) -> Iterator[tuple[Held, Tensor, Tensor, float]]:
        """Each held part, what is there, the whole tensor it should be cut from, and the magnitude to measure by."""
        least = self.floor * max(largest(tensor) for tensor in expected.values()) if self.floor else 0.0
        for name, part in got.items():
            if name in expected:
                yield self.held[name], part, expected[name], max(largest(expected[name]), least) or 1.0

    def _add(self, what: str, parameter: str, step: int, relative: float) -> None:
        relative = inf if isnan(relative) else relative
        self.errors.append(Error(what, parameter, step, self.rank, relative, self.check))


def coverage(ranks: list[list[Held]], expected: Mapping[str, tuple[int, ...]]) -> str | None:
    """What the ranks together hold too much or too little of the model; None if each element is there.

    Args:
        ranks: what each rank holds.
        expected: parameter name → whole shape.
    """
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
    """Largest difference of any element, relative to `scale`.

    Args:
        got, expected: of one shape.
        scale: by default the largest expected magnitude, or 1 where that is 0.
    """
    return largest(got - expected) / (scale or largest(expected) or 1.0)


def largest(tensor: Tensor) -> float:
    """Magnitude of the largest element; 0 of none."""
    return tensor.abs().max().item() if tensor.numel() else 0.0

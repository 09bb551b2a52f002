"""Verification results: a verdict for each layout, and where it first departs from the single process."""

from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Final, Literal

from threefold.comm.layout import Layout, LayoutSpec
from threefold.verify.compare import (
    BUFFER,
    CLIPPED,
    EVALUATION,
    GRADIENT,
    INITIAL,
    LOSS,
    NORM,
    SCALE,
    WEIGHT,
    Error,
    Held,
)
from threefold.verify.rank_worker import CHECKS, RankReport

EQUAL: Final = "equal"
DEPARTS: Final = "departs"
FAILED: Final = "error"
UNSPLIT: Final = "unsplit"
_FIRST = (INITIAL, EVALUATION, GRADIENT, LOSS, NORM, CLIPPED, WEIGHT, BUFFER, SCALE)
_ORDER = ("", *CHECKS)
Verdict = Literal["equal", "departs", "error", "unsplit"]


@dataclass(frozen=True)
class LocatedError:
    """Error with the rank and the stage where it occurred.

    Attributes:
        what, parameter, step, relative, check: see `Error`.
        rank: global rank.
        dp, tp, pp, cp: coordinates of the rank.
        stage: pipeline stage of the parameter; for a loss or norm, the rank's pp coordinate.
    """

    what: str
    parameter: str
    step: int
    relative: float
    rank: int
    dp: int
    tp: int
    pp: int
    cp: int
    stage: int
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
        if self.check:
            return " ".join(part for part in (f"{self.check}:", what, self.parameter) if part)
        return " ".join(part for part in (f"step {self.step}" if self.step else "", what, self.parameter) if part)

    def where(self, layout: Layout) -> str:
        """Format the coordinates on the axes of the layout: `stage 1, tp shard 0 of 2, rank 2`."""
        parts = [f"stage {self.stage}"] if layout.pp > 1 else []
        names = {"tp": "tp shard", "dp": "dp replica", "cp": "cp part"}
        parts += [
            f"{name} {getattr(self, axis)} of {layout.size(axis)}"
            for axis, name in names.items()
            if layout.size(axis) > 1
        ]
        return ", ".join([*parts, f"rank {self.rank}"])


@dataclass(frozen=True)
class LayoutResult:
    """Result of comparing a layout with a single process.

    Attributes:
        verdict: `equal`, `departs`, `error` (did not run to the end) or `unsplit` (equal, but one of its axes shards
            nothing of the model, so nothing is verified).
        seconds: wall-clock time.
        worst: largest relative error of all comparisons; None if the run failed.
        first: first departure: the earliest step, then the earliest of initial weights, evaluation, gradients, loss,
            norm, clipped gradients, weights and buffers, then the first in model order and the lowest rank.
        nearest_to_loss: if gradients depart while the step's loss is equal, the last of them in model order. The fault
            is there, as the backward pass goes from the last layer to the first.
        departing: names of the parameters that depart in the step of the first departure, in model order.
        sent: axis → largest number of bytes of a rank's tensors in the collectives of one step.
        parameters: largest number of parameter elements that a rank updates.
        message: message of an error, of a departure that is not numerical, or about the axes that shard nothing.
        details: traceback of an error.
        checks: checks of the second run, each with its largest relative error, in order.
    """

    spec: LayoutSpec
    verdict: Verdict
    seconds: float
    worst: LocatedError | None = None
    first: LocatedError | None = None
    nearest_to_loss: str = ""
    departing: tuple[str, ...] = ()
    sent: tuple[tuple[str, int], ...] = ()
    parameters: int = 0
    message: str = ""
    details: str = ""
    checks: tuple[tuple[str, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the result as the JSON object that docs/verify.md describes."""
        layout = self.spec.layout
        return {
            "layout": str(self.spec),
            "axes": {axis: layout.size(axis) for axis in ("dp", "tp", "pp", "cp", "ep")},
            "settings": dict(self.spec.settings),
            "verdict": self.verdict,
            "seconds": round(self.seconds, 3),
            "worst": self.worst and asdict(self.worst),
            "first_departure": self.first and asdict(self.first),
            "nearest_to_loss": self.nearest_to_loss,
            "departing_parameters": list(self.departing),
            "bytes_per_step": dict(self.sent),
            "parameters_per_rank": self.parameters,
            "message": self.message,
            "checks": dict(self.checks),
        }


def judge(
    spec: LayoutSpec, reports: list[RankReport], order: list[str], tolerance: float, seconds: float, missing: str | None
) -> LayoutResult:
    """Return the result of a layout from the reports of its ranks.

    `order` lists the parameters in model order; errors up to `tolerance` are equal; `missing` is the result of
    `coverage`.
    """
    number = {name: place for place, name in enumerate(order)}
    places = [_located(error, report.held, spec) for report in reports for error in report.errors]
    worst = max(places, key=lambda place: place.relative)
    wrong = [place for place in places if not place.relative <= tolerance]
    first = min(
        wrong,
        key=lambda place: (
            _ORDER.index(place.check),
            place.step,
            _FIRST.index(place.what),
            number.get(place.parameter, 0),
            place.rank,
        ),
        default=None,
    )
    early = {place.parameter for place in wrong if first and _are_together(place, first) and place.parameter}
    departing = sorted(early, key=lambda name: number.get(name, 0))
    idle = "" if wrong or missing else _nothing_split(spec, reports, order)
    return LayoutResult(
        spec,
        DEPARTS if wrong or missing else UNSPLIT if idle else EQUAL,
        seconds,
        worst=worst,
        first=first,
        nearest_to_loss=_nearest_to_loss(wrong, first, number),
        departing=tuple(departing),
        sent=_most([report.sent for report in reports]),
        parameters=max(sum(prod(part.shape) for part in report.held) for report in reports),
        message=missing or idle,
        checks=tuple((check, found) for check in CHECKS if (found := _largest(places, check)) is not None),
    )


def _nothing_split(spec: LayoutSpec, reports: list[RankReport], order: list[str]) -> str:
    """Return a message that names the axes that should shard the model but do not; empty if there are none."""
    layout, cut = spec.layout, {axis for report in reports for axis in report.cut}
    sharing = {
        "tp": layout.tp == 1 or "tp" in cut,
        "ep": layout.ep == 1 or "ep" in cut,
        "pp": layout.pp == 1 or any({part.name for part in report.held} != set(order) for report in reports),
        "zero": not spec.setting("parallel.zero") or bool(cut - {"tp", "ep"}),
    }
    idle = [axis for axis, shared in sharing.items() if not shared]
    return f"nothing is split over {' and '.join(idle)}: every rank of it holds the same parameters" if idle else ""


def _nearest_to_loss(wrong: list[LocatedError], first: LocatedError | None, number: dict[str, int]) -> str:
    if first is None or first.what != GRADIENT:
        return ""
    now = [place for place in wrong if _are_together(place, first)]
    if any(place.what == LOSS for place in now):
        return ""
    return max((place.parameter for place in now if place.what == GRADIENT), key=lambda name: number.get(name, 0))


def _are_together(one: LocatedError, other: LocatedError) -> bool:
    return (one.check, one.step) == (other.check, other.step)


def _largest(places: list[LocatedError], check: str) -> float | None:
    return max((place.relative for place in places if place.check == check), default=None)


def _located(error: Error, held: list[Held], spec: LayoutSpec) -> LocatedError:
    at = spec.layout.coordinates(error.rank)
    stage = next((part.stage for part in held if part.name == error.parameter), at.pp)
    coordinates = (at.dp, at.tp, at.pp, at.cp, stage)
    return LocatedError(
        error.what, error.parameter, error.step, error.relative, error.rank, *coordinates, check=error.check
    )


def _most(sent: list[dict[str, int]]) -> tuple[tuple[str, int], ...]:
    axes = sorted({axis for rank in sent for axis in rank})
    return tuple((axis, max(rank.get(axis, 0) for rank in sent)) for axis in axes)

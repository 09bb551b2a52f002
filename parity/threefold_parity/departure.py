"""Departures of a record from the reference, in the order in which a step computes the quantities."""

from collections import Counter
from dataclasses import dataclass, field
from math import nan
from typing import Final

from threefold_parity.record import BUFFER, GRADIENT, INITIAL, OUTPUT, OUTPUT_GRADIENT, STATE, TENSOR, UPDATE

SAMPLES, LOSS, NORM, NUMBER, RATE = "samples", "loss", "gradient norm", "number", "counter"
SAME: Final = 1e-6
"""Relative difference of counters that counts as rounding."""
SUMMED: Final = 1e-5
"""The same for initial weights, whose projections are fp32 sums of different pieces."""
LOOSE: Final = 0.5
"""Tolerance above which half of a tensor may be wrong."""
PHASES: Final = {
    INITIAL: "Before the first step, initial weights depart",
    SAMPLES: "The runs read different samples",
    OUTPUT: "The forward pass departs",
    LOSS: "All outputs are right and the loss departs",
    OUTPUT_GRADIENT: "The forward pass is right and the backward pass departs",
    GRADIENT: "Forward and backward passes are right and gradients of parameters depart",
    NORM: "All gradients are right and their reported norm, or the clip, departs",
    RATE: "All gradients are right and a counter of the update departs",
    UPDATE: "All gradients are right and updates depart",
    STATE: "Gradients and updates are right and the optimizer's state departs",
    BUFFER: "Weights are right and a buffer departs",
    TENSOR: "Weights are right and a recorded tensor departs",
    NUMBER: "Weights are right and a reported number departs",
}
"""Kinds in the order of a step, each with the beginning of a verdict on it."""
_COUNTERS: Final = {"lr": "learning rate", "weight_decay": "weight decay", "updates": "count of updates"}


@dataclass(frozen=True)
class Departure:
    """A quantity that differs by more than rounding.

    Attributes:
        step: from 1; 0 for before the first.
        kind: one of `PHASES`.
        error, tolerance: relative error, and the one that counts as rounding.
        scale: nearest factor of the reference.
        shape: shape of the mistake, a predicate; empty if none explains the difference.
        where: ranks or shards, if they can be determined.
        copies: whether ranks that should hold the same values differ.
        readers: for the gradient of an output, the modules that read it, whose backward passes computed it.
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
    readers: str = ""

    def __str__(self) -> str:
        """Format as `the gradient of blocks.0.mlp.up.weight`."""
        kind = self.kind
        if kind == OUTPUT_GRADIENT:
            readers = f", which {self.readers} reads" if self.readers else ""
            return f"the gradient of the output of {self.name}{readers}"
        if kind in (SAMPLES, LOSS):
            return f"the {kind}"
        if kind == NORM:
            return f"the {self.name}"
        if kind.startswith(STATE):
            return f"{kind.removeprefix(STATE).strip()} of {self.name} in the optimizer"
        if kind in (NUMBER, TENSOR):
            return self.name
        if kind == RATE:
            key, _, name = self.name.partition(" of ")
            return f"the {_COUNTERS.get(key, key)} of {name}"
        return f"the {kind} of {self.name}"


@dataclass
class Findings:
    """Compared quantities and departures, in the order of a step.

    Attributes:
        compared: number of compared quantities by kind.
        notes: sentences on quantities that could not be compared, or that explain a departure.
        order: modules in the order of the forward pass, for the tree.
        worst: largest error by step, kind and name, relative to its tolerance.
        totals: number of compared names by step and kind.
        loose: parameters and modules whose tolerance is so wide that only factors and large mistakes show.
        whole: by kind and name, whether all elements of a tensor were compared in every step.
        skipped: modules whose output one of the records has only in part, in another shape or for other samples.
        shares: whether the candidate's loss is a sum of shares that its ranks report.
        padded: whether samples were matched without their padding.
        epoch_steps: number of steps of an epoch; 0 if the recorder does not know it.
        after: number of updates before the first compared step.
    """

    departures: list[Departure] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    notes: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    worst: dict[tuple[int, str, str], float] = field(default_factory=dict)
    totals: Counter[tuple[int, str]] = field(default_factory=Counter)
    loose: set[str] = field(default_factory=set)
    whole: dict[tuple[str, str], bool] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)
    shares: bool = False
    padded: bool = False
    epoch_steps: int = 0
    after: int = 0

    @property
    def equal(self) -> bool:
        return not self.departures


def phase_of(departure: Departure) -> int:
    return list(PHASES).index(without_key(departure.kind))


def without_key(kind: str) -> str:
    return STATE if kind.startswith(STATE) else kind

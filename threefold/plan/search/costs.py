"""What the search asks of a cost model, and what it answers for one layout."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from threefold.plan.search.choice import LayoutChoice
from threefold.plan.search.space import MeshSizes, Options

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Evaluated:
    """A layout, its time and its memory.

    Attributes:
        choice: the layout.
        seconds: of a step.
        tokens_per_second: of all ranks together.
        mfu: model FLOPs of a step over what the devices could do in its time.
        peak_bytes: of each pipeline rank, of those the one with the most.
        limits: the causes that take the most of a step, the largest first, each with its share of it.
        details: further figures, for `--json`.
    """

    choice: LayoutChoice
    seconds: float
    tokens_per_second: float
    mfu: float
    peak_bytes: tuple[int, ...]
    limits: tuple[tuple[str, float], ...]
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Bytes of the rank with the most."""
        return max(self.peak_bytes)


class Costs(Protocol):
    """A cost model of one config on one type of hardware."""

    def usable_bytes(self, gpus: int) -> int:
        """Memory that a rank may use where there are so many."""

    def least_bytes(self, mesh: MeshSizes, options: Options) -> Array:
        """Bytes that the rank with the most needs at least, for all options of a mesh at once, those among them that
        are not sound; in the dims of `space.DIMS`, or 1 where all of a dim are alike."""

    def least_seconds(self, mesh: MeshSizes, options: Options, wanted: Mask) -> Array:
        """Seconds that a step takes at least, likewise.

        Args:
            mesh: of the ranks.
            options: of the mesh.
            wanted: which of them are asked for, in all dims; of the others it may say anything.
        """

    def evaluate(self, choice: LayoutChoice) -> Evaluated:
        """Exactly."""

    def largest_part(self, choice: LayoutChoice) -> str:
        """What takes the most memory on the rank with the most, in words with its size."""

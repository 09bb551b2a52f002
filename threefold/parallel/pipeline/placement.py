"""Which pipeline rank holds which stages, and which layers these have."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StageMap:
    """The stages of a pipeline, their layers and their ranks.

    Attributes:
        bounds: first layer of each stage, and the number of layers.
        ranks: the coordinate on the pp axis of the rank that holds each stage.
    """

    bounds: tuple[int, ...]
    ranks: tuple[int, ...]

    def held_by(self, rank: int) -> list[int]:
        """Numbers of the stages that `rank` of the pp axis holds, ascending."""
        return [stage for stage, holder in enumerate(self.ranks) if holder == rank]

    def layers(self, stage: int) -> tuple[int, int]:
        """First and past-the-last layer of a stage."""
        return self.bounds[stage], self.bounds[stage + 1]

    def stage_of(self, layer: int) -> int:
        """The stage that holds `layer`."""
        return next(stage for stage in range(len(self.ranks)) if self.bounds[stage] <= layer < self.bounds[stage + 1])

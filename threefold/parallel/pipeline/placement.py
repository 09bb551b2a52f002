"""Which pipeline rank holds which stages, schedule by schedule."""

from dataclasses import dataclass

V_SHAPED = ("zbv", "dualpipev")
"""Schedules whose two stages a rank are the n-th and the n-th from the end: the first and the last share a rank."""

SINGLE = ("gpipe", "1f1b")
"""Schedules of one stage a rank."""


@dataclass(frozen=True)
class StageMap:
    """The stages of a pipeline, their layers and their ranks.

    Attributes:
        bounds: first layer of each stage, and the number of layers.
        ranks: the place on the pp axis that holds each stage.
    """

    bounds: tuple[int, ...]
    ranks: tuple[int, ...]

    def held_by(self, rank: int) -> list[int]:
        """Numbers of the stages at `rank` of the pp axis, ascending."""
        return [stage for stage, place in enumerate(self.ranks) if place == rank]

    def layers(self, stage: int) -> tuple[int, int]:
        """First and past-the-last layer of a stage."""
        return self.bounds[stage], self.bounds[stage + 1]

    def stage_of(self, layer: int) -> int:
        """The stage that has `layer`."""
        return next(stage for stage in range(len(self.ranks)) if self.bounds[stage] <= layer < self.bounds[stage + 1])


def stage_ranks(schedule: str, pp: int, chunks: int) -> tuple[int, ...]:
    """The place on the pp axis of each of the pp · `chunks` stages.

    Args:
        schedule: as in `parallel.schedule`.
        pp: size of the axis.
        chunks: stages a rank has; 2 for the V-shaped schedules, 1 for `SINGLE`.
    """
    if schedule in V_SHAPED:
        return (*range(pp), *reversed(range(pp)))
    return tuple(stage % pp for stage in range(pp * chunks))

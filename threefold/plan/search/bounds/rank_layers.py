"""What the ranks of a pipeline hold: how many layers of each kind, for all schedules of a mesh at once.

Ranks that hold as many layers of each kind are alike; each such group is one row of the arrays here.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from threefold.config.schedules import Schedule, find_schedule
from threefold.config.schema import Config
from threefold.errors import UserError
from threefold.models.sharding import ModelPlan
from threefold.parallel.pipeline.placement import StageMap
from threefold.parallel.pipeline.stage_map import partitioned
from threefold.plan.search.soundness import Settings

Counts = NDArray[np.float64]


class LayerKinds:
    """The layers of a model by kind: layers of a kind cost the same.

    Args:
        config: resolved.
        plan: of its model.

    Attributes:
        of_layer: the kind of each layer, from 0.
        first: of each kind, its first layer.
    """

    def __init__(self, config: Config, plan: ModelPlan) -> None:
        model, numbers = config.model, dict[object, int]()
        last = len(plan.layers) - 1
        self.of_layer: list[int] = []
        self.first: list[int] = []
        for layer in range(len(plan.layers)):
            ends = layer in (0, last)
            key = layer if ends else (model.has_experts(layer - 1), model.window(layer - 1))
            kind = numbers.setdefault(key, len(numbers))
            if kind == len(self.first):
                self.first.append(layer)
            self.of_layer.append(kind)

    @property
    def count(self) -> int:
        return len(self.first)

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """The kinds of blocks, each with the number of its first block."""
        return [(kind, layer - 1) for kind, layer in enumerate(self.first) if 0 < layer < len(self.of_layer) - 1]

    @property
    def head(self) -> int:
        """The kind of the last layer; that of the first is 0."""
        return self.of_layer[-1]


@dataclass(frozen=True)
class RankLayers:
    """The different ranks under each schedule of a mesh, a row for each.

    Attributes:
        starts: for each schedule, its first row.
        schedule: of each row, the index of its schedule.
        counts: layers of each kind that the rank holds, [rows, kinds].
        smallest: layers of each kind of its n smallest stages, [rows, n from 0 on, kinds].
        passes: passes through a stage that the rank holds at once at its peak, at least; infinite for all of a step.
        deferred: how many of these at most wait for their weight gradients alone.
        folded: whether the rank has two stages one after the other.
        chunks: for each schedule, stages of a rank.
    """

    starts: NDArray[np.int64]
    schedule: NDArray[np.int64]
    counts: Counts
    smallest: Counts
    passes: NDArray[np.float64]
    deferred: NDArray[np.float64]
    folded: NDArray[np.bool_]
    chunks: NDArray[np.float64]

    def of_row(self, of_schedule: NDArray[Any]) -> NDArray[Any]:
        """What is known of each schedule, for each row."""
        return of_schedule[self.schedule]


def rank_layers(
    plan: ModelPlan, kinds: LayerKinds, pp: int, schedules: Sequence[Settings], partition: str | Sequence[int]
) -> RankLayers:
    """Those of all schedules of a mesh.

    Args:
        plan: of the model.
        kinds: of its layers.
        pp: ranks of the pipeline.
        schedules: each as settings.
        partition: as `parallel.partition`.
    """
    starts: list[int] = []
    owners: list[int] = []
    rows: list[Counts] = []
    stacks: list[Counts] = []
    passes: list[float] = []
    deferred: list[float] = []
    folded: list[bool] = []
    chunks: list[int] = []
    blocks = [kind for kind, _ in kinds.blocks]
    before = np.zeros((len(kinds.of_layer) + 1, kinds.count))
    before[1:] = np.cumsum(np.eye(kinds.count)[kinds.of_layer], axis=0)
    for number, settings in enumerate(schedules):
        schedule, count = find_schedule(settings["parallel.schedule"]), settings["parallel.stage_chunks"]
        stages = StageMap((0, len(plan.layers)), (0,))
        if pp > 1:
            with suppress(UserError):  # of a layout that is not sound
                stages = partitioned(plan, pp, schedule, count, partition, 0)
        bounds = np.array(stages.bounds)
        each = before[bounds[1:]] - before[bounds[:-1]]
        found: dict[bytes, tuple[Counts, Counts, list[tuple[float, float]]]] = {}
        for rank in range(max(stages.ranks) + 1):
            held = each[[stage for stage, holder in enumerate(stages.ranks) if holder == rank]]
            held = held[np.argsort(held[:, blocks].sum(axis=1), kind="stable")]
            total, stack = held.sum(axis=0), np.concatenate([np.zeros((1, kinds.count)), np.cumsum(held, axis=0)])
            most = _passes(schedule, pp, rank, count)
            row = found.setdefault(stack.tobytes(), (total, stack, []))
            row[2].append(most)
        starts.append(len(owners))
        for total, stack, flights in found.values():
            owners.append(number)
            rows.append(total)
            stacks.append(stack)
            passes.append(max(held for held, _ in flights))
            deferred.append(max(waiting for _, waiting in flights))
            folded.append(count > 1 and any(one == other for one, other in pairwise(stages.ranks)))
        chunks.append(count)
    return RankLayers(
        np.array(starts),
        np.array(owners),
        np.array(rows),
        _padded(stacks),
        np.array(passes),
        np.array(deferred),
        np.array(folded),
        np.array(chunks, dtype=float),
    )


def _passes(schedule: Schedule, pp: int, rank: int, chunks: int) -> tuple[float, float]:
    """Passes that a rank holds at once, and how many of them at most wait for their weight gradients alone."""
    if pp == 1:
        return 1.0, 0.0
    # Where weight gradients are deferred the table has an upper bound; all ranks hold as many as the first.
    flight = schedule.in_flight(pp, 0 if schedule.defers_weight_gradients else rank, chunks)
    if flight is None:
        return float("inf"), 0.0
    if not schedule.defers_weight_gradients:
        return flight * chunks, 0.0
    return max(1.0, flight * chunks - 1), float(rank)


def _padded(stacks: Sequence[Counts]) -> Counts:
    """Stacks of several lengths in one array; the shorter ones stay as they end."""
    most = max(len(stack) for stack in stacks)
    return np.stack([np.concatenate([stack, np.repeat(stack[-1:], most - len(stack), axis=0)]) for stack in stacks])

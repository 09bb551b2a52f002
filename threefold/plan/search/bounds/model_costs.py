"""The cost model of the search: `plan.cost` and `plan.memory`, exactly for one layout and as bounds for many."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from threefold.byte_sizes import format_bytes
from threefold.models.registry import model_plan
from threefold.plan.cost.estimate import estimate, usable_memory
from threefold.plan.cost.parameters import layer_elements
from threefold.plan.memory.systems import keeps_of
from threefold.plan.search.bounds.least_bytes import LeastBytes
from threefold.plan.search.bounds.least_seconds import LeastSeconds
from threefold.plan.search.bounds.rank_layers import LayerKinds, RankLayers, rank_layers
from threefold.plan.search.choice import LayoutChoice
from threefold.plan.search.costs import Array, Evaluated, Mask
from threefold.plan.search.in_layout import in_layout
from threefold.plan.search.request import Request
from threefold.plan.search.soundness import Settings
from threefold.plan.search.space import MeshSizes, Options

_TOLD: Final = 2
"""Causes that are named as what limits a layout."""


class ModelCosts:
    """The costs of a request.

    Args:
        request: what is searched.
    """

    def __init__(self, request: Request) -> None:
        self._config, self._hardware = request.config, request.hardware
        self._system = request.system
        self._plan = model_plan(self._config.model, self._config.data.sequence_length)
        self._kinds = LayerKinds(self._config, self._plan)
        self._ranks: dict[tuple[int, int], RankLayers] = {}
        keeps = keeps_of(self._system.name, self._hardware.device)
        self._seconds = LeastSeconds(self._config, self._hardware, self._system, self._kinds)
        self._bytes = LeastBytes(self._config, self._hardware.device, keeps, self._kinds)

    def usable_bytes(self, gpus: int) -> int:
        """As of `Costs`."""
        return usable_memory(self._hardware.shared_by(gpus))

    def least_bytes(self, mesh: MeshSizes, options: Options) -> Array:
        """As of `Costs`."""
        return self._bytes(mesh, options, self._rank_layers(mesh.pp, options.schedule))

    def least_seconds(self, mesh: MeshSizes, options: Options, wanted: Mask) -> Array:
        """As of `Costs`."""
        ranks = self._rank_layers(mesh.pp, options.schedule)
        first = options.choice(mesh, [0] * len(options.shape))
        elements = np.array(layer_elements(in_layout(self._config, first)))[self._kinds.first]
        return self._seconds(mesh, options, ranks, ranks.counts @ elements, wanted)

    def evaluate(self, choice: LayoutChoice) -> Evaluated:
        """As of `Costs`."""
        found = estimate(in_layout(self._config, choice), self._hardware, self._system)
        causes = found.time.causes
        largest = sorted(causes, key=causes.__getitem__, reverse=True)[:_TOLD]
        return Evaluated(
            choice,
            found.step_seconds,
            found.tokens_per_second,
            found.mfu,
            tuple(found.needed_bytes),
            tuple((name, causes[name] / found.step_seconds) for name in largest),
            {
                "peak_bytes": found.peak_bytes,
                "needed_bytes": found.needed_bytes,
                "seconds": {name: seconds for name, seconds in causes.items() if seconds},
            },
        )

    def largest_part(self, choice: LayoutChoice) -> str:
        """As of `Costs`."""
        found = estimate(in_layout(self._config, choice), self._hardware, self._system)
        stage = max(found.stages, key=lambda each: each.peak)
        name = max(stage.causes, key=stage.causes.__getitem__)
        return f"{name} {format_bytes(stage.causes[name])}"

    def _rank_layers(self, pp: int, schedules: Sequence[Settings]) -> RankLayers:
        key = pp, id(schedules)
        if key not in self._ranks:
            partition = self._config.parallel.partition
            self._ranks[key] = rank_layers(self._plan, self._kinds, pp, schedules, partition)
        return self._ranks[key]

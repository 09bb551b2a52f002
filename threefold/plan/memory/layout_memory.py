"""The peak memory of the ranks of a layout: states, passes in flight, and the largest moment of a pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from threefold.config import Config
from threefold.config.schema import ParallelConfig, PrecisionConfig
from threefold.plan.memory.flight import flights_of
from threefold.plan.memory.layer_memory import LayerMemory
from threefold.plan.memory.systems import Keeps
from threefold.plan.memory.walk import GradientSharing, Moment, Run, backward_moments, forward_moment
from threefold.plan.model_size import ModelSize, RankSize


@dataclass(frozen=True)
class StageRuns:
    """A stage, as far as memory goes.

    Attributes:
        runs: its layers.
        output: bytes of its output, which a pass keeps as well; 0 of the last stage.
        sharing: of its gradients and weights.
        gradient: elements of the largest gradient of a weight.
        sent: bytes of the gradient that it sends to the stage before it; 0 of the first stage.
        hands_on: whether the next stage is on the same rank.
    """

    runs: tuple[Run, ...]
    output: int
    sharing: GradientSharing
    gradient: int
    sent: int
    hands_on: bool

    @property
    def kept(self) -> int:
        """Bytes that a pass keeps."""
        return self.output + sum(run.count * run.layer.kept for run in self.runs)

    @property
    def deferred(self) -> int:
        """Bytes that remain of it until the pass for the weights."""
        return sum(run.count * run.layer.deferred for run in self.runs)


class LayoutMemory:
    """The memory of the ranks of a layout.

    Args:
        config: resolved.
        device: `cpu` or `cuda`.
        keeps: of the training system.

    Raises:
        UserError: as `stages.stage_memory`.
    """

    def __init__(self, config: Config, device: str, keeps: Keeps) -> None:
        self._config, self.keeps = config, keeps
        self.size = ModelSize(config)
        parallel, train = config.parallel, config.train
        self._micro_batches = train.gradient_accumulation_steps
        self._flights = flights_of(parallel.pipeline_schedule, parallel.pp, parallel.stage_chunks, self._micro_batches)
        replayed = self.size.weights.recomputed(train.recompute, train.recompute_every)
        self._layers = LayerMemory(config, device, keeps, self.size.weights.plan.layers, replayed)
        # The allocator of a GPU keeps what it had in the step before.
        self._gradients_grow = self._micro_batches == 1 and device == "cpu"

    @property
    def narrow_logits(self) -> int:
        """Bytes of logits that are cast to fp32 for the loss; 0 where none are."""
        return self._layers.narrow_logits

    def peak(self, pp_rank: int) -> tuple[RankSize, Moment]:
        """What a rank has all the time, and beside it at the moment when it has the most."""
        stages = [self._stage(number, pp_rank) for number in self.size.map.held_by(pp_rank)]
        states, moments = self._states(pp_rank), list(self._moments(pp_rank, stages))
        return states, max(moments, key=lambda moment: moment.total)

    def _moments(self, pp_rank: int, stages: Sequence[StageRuns]) -> Iterator[Moment]:
        flights = self._flights[pp_rank]
        kept = flights.held @ np.array([stage.kept for stage in stages], dtype=float)
        kept += flights.deferred @ np.array([stage.deferred for stage in stages], dtype=float)
        kept += flights.sent * max(stage.sent for stage in stages)
        for place, stage in enumerate(stages[:-1]):
            if stage.hands_on:  # what one stage of a rank hands to another of it is there once
                kept -= stage.output * np.minimum(flights.held[:, place], flights.held[:, place + 1])
        for (kind, place), actions in flights.alike.items():
            most = int(kept[actions].max())
            for moment in _of_action(kind, stages[place]):
                yield moment.plus(activations=most)
        yield from self._reduction(pp_rank)

    def _reduction(self, pp_rank: int) -> Iterator[Moment]:
        """The end of a step with ZeRO 1, where the first group of gradients is reduce-scattered."""
        if self._config.parallel.zero == 1:
            precision = self._config.precision
            groups = self.size.gathered_together(pp_rank, self.size.largest_place(pp_rank).unshared)
            largest = max(sum(group) for group in groups)
            all_new = sum(map(sum, groups)) * precision.master_itemsize if self._gradients_grow else 0
            yield Moment(
                buffers=largest * precision.master_itemsize,
                weights=-largest * precision.itemsize,
                gradients=all_new,
            )

    def _states(self, pp_rank: int) -> RankSize:
        """What there is from the first micro-batch to the update: of ZeRO without what is gathered for a layer."""
        place = self.size.largest_place(pp_rank)
        whole = self.size.weights.held(self.size.layers_of_rank(pp_rank), place.unshared).all
        found, config = self.size.rank(pp_rank, place), self._config
        return standing_states(found, whole, config.parallel, config.precision, self.keeps, self._gradients_grow)

    def _stage(self, number: int, pp_rank: int) -> StageRuns:
        config, place = self._config, self.size.largest_place(pp_rank)
        weights, layers = self.size.weights, self.size.layers_of(number)
        whole = place.unshared
        together = weights.sharing(layers)
        tied = weights.held(together, whole).all
        runs = []
        for (_, layer), alike in groupby(layers, key=lambda name: (weights.kinds[name], self._layers.of(name))):
            names = list(alike)
            own = 0 if names[0] in together else weights.held(names[:1], whole).all
            ends = {"is_head": names[-1] == weights.plan.layers[-1], "is_embedding": names[0] == weights.plan.layers[0]}
            runs.append(Run(layer, len(names), own, **ends))
        zero, precision = config.parallel.zero, config.precision
        sharing = GradientSharing(
            zero,
            max(1, place.zero.count),
            precision.itemsize,
            precision.master_itemsize,
            tied,
            self.keeps.kernels.gradients_in_place,
            self._micro_batches > 1,
            self._gradients_grow,
        )
        outer = self._layers.output
        ranks = self.size.map.ranks
        is_last = number == len(ranks) - 1
        return StageRuns(
            tuple(runs),
            0 if is_last else outer,
            sharing,
            max(run.layer.largest for run in runs if not run.is_embedding or len(runs) == 1),
            outer if number else 0,
            not is_last and ranks[number + 1] == pp_rank,
        )


def standing_states(
    found: RankSize,
    whole: int,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    keeps: Keeps,
    gradients_grow: bool,
) -> RankSize:
    """What a rank has from the first micro-batch to the update: of ZeRO without what is gathered for a layer.

    Args:
        found: the largest that its states are in a step.
        whole: elements of its weights, before ZeRO shards them.
        parallel, precision: sections of a resolved config.
        keeps: of the training system.
        gradients_grow: whether there are no gradients before the backward pass.
    """
    wide = precision.master_itemsize
    narrow = precision.itemsize if precision.itemsize < wide else 0
    added = precision.itemsize if precision.dtype in keeps.narrow_gradients else wide
    if not parallel.zero:
        if keeps.shards_optimizer:
            replicas = parallel.dp * parallel.cp
            weights = found.parameters * narrow + found.parameters * wide // replicas
            found = found._replace(weights=weights, optimizer=found.optimizer // replicas)
        return found._replace(gradients=found.parameters * added)
    gathered = whole * precision.itemsize if parallel.zero < 3 else 0
    gradients = 0 if gradients_grow else (whole if parallel.zero == 1 else found.parameters) * added
    return RankSize(found.parameters, found.parameters * wide + gathered, gradients, found.optimizer)


def _of_action(kind: str, stage: StageRuns) -> Iterator[Moment]:
    """The largest moments of an action, beside all that is held when it begins."""
    if kind == "F":
        yield forward_moment(stage.runs, stage.sharing)
    elif kind == "W":
        yield Moment(activations=stage.deferred, gradients=stage.sharing.gradient(stage.gradient))
    else:
        yield from backward_moments(stage.runs, stage.sharing, kind == "I")

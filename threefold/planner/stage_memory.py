"""Peak memory of each pipeline stage by cause, computed without torch; `stage_memory` is the entry point."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from threefold.config import Config
from threefold.config.rules import executed_micro_batches
from threefold.config.schedules import SENDS_UNDER_WAY, Action, StageSchedule
from threefold.config.schema import ParallelConfig, PrecisionConfig
from threefold.planner.activations import LayerBytes, LayerMemory
from threefold.planner.model_size import ZERO_WEIGHTS, ModelSize, RankSize, described_blocks
from threefold.planner.schedule import orders_of
from threefold.planner.systems import Keeps, keeps_of

RESERVE: Final = 2 << 30
"""Bytes of GPU memory that tensors cannot use: the CUDA context and cuBLAS workspaces (some 0.7 GiB), and NCCL buffers
(some 0.2 GiB for each of a handful of groups)."""


@dataclass(frozen=True)
class StageMemory:
    """Memory by cause of one pipeline rank at the peak of a step, in bytes.

    Weights are master and compute weights, including gathered ones (ZeRO); activations those kept for the backward
    passes of all micro-batches in flight. `working` is the transient memory of a block (gradients of activations,
    recomputed activations), `logits` that of the head (logits, probabilities and their gradients), and `buffers` those
    of ZeRO's gathers and reduce-scatters, and of receives. `fragmentation` is memory that the allocator cannot use
    between tensors; of it, `given_back` is released if memory runs out: blocks that no tensor fits.
    """

    pp_rank: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    logits: int
    buffers: int
    fragmentation: int
    given_back: int = 0

    @property
    def causes(self) -> dict[str, int]:
        return {name: value for name, value in asdict(self).items() if name not in ("pp_rank", "given_back")}

    @property
    def by_dry_run(self) -> dict[str, int]:
        """Bytes by a dry run's causes, where activations include all transient memory."""
        found = self.causes
        found["activations"] += sum(found.pop(name) for name in ("working", "logits", "buffers"))
        return found

    @property
    def peak(self) -> int:
        """Total bytes, as an allocator reports its reserved memory."""
        return sum(self.causes.values())

    @property
    def needed(self) -> int:
        """Bytes that the device must have."""
        return self.peak - self.given_back

    @property
    def tensors(self) -> int:
        """Total bytes without the allocator's fragmentation."""
        return self.peak - self.fragmentation


def as_executed(config: Config) -> Config:
    """Return a resolved config with the micro-batches that a replica runs (`executed_micro_batches`)."""
    if not config.train.exact:
        return config
    count, samples = executed_micro_batches(config)
    batches = {"gradient_accumulation_steps": count, "micro_batch_size": samples}
    return config.model_copy(update={"train": config.train.model_copy(update=batches)})


def stage_memory(config: Config, device: str = "cuda", system: str = "own") -> list[StageMemory]:
    """Return the peak memory of each pipeline rank; among the ranks at one pp coordinate, that of the largest.

    The kernels of the device, `cpu` or `cuda`, and of the training system (a name in `planner.systems`) decide which
    tensors are kept. A model from a file has no formulas, which is a `UserError`.
    """
    described_blocks(config)
    layout = LayoutMemory(as_executed(config), device, keeps_of(system, device))
    return [layout.peak(rank) for rank in range(config.parallel.pp)]


class Moment(NamedTuple):
    """Bytes by cause at one moment of a pass, relative to its beginning.

    Activations are negative for those that the pass has freed. `working` are transient gradients of activations and
    weights, and recomputed activations; `logits` the head's working memory; `gradients` those of weights until they are
    reduced; `weights` gathered ones (ZeRO 3); `buffers` those of collectives.
    """

    activations: float = 0
    working: float = 0
    logits: float = 0
    gradients: float = 0
    weights: float = 0
    buffers: float = 0

    @property
    def total(self) -> float:
        return sum(self)

    def plus(self, **changes: float) -> "Moment":
        return self._replace(**{name: getattr(self, name) + value for name, value in changes.items()})


@dataclass(frozen=True)
class Run:
    """Consecutive equal layers of a stage, with the bytes of one layer, the elements of its weights, and of those that
    are trained, without shared ones."""

    layer: LayerBytes
    count: int
    elements: int
    trained: int
    is_head: bool = False
    is_embedding: bool = False


@dataclass(frozen=True)
class StageLayers:
    """Layers of a pipeline stage.

    A pass also keeps the stage's `output` (0 bytes for the last stage), which the next stage shares if it is on the
    same rank (`hands_on`); `sent` is the gradient for the previous stage (0 for the first). The `tied` elements of
    layers of the stage that share weights are gathered for all of them together; `tied_trained` have gradients.
    """

    runs: tuple[Run, ...]
    output: int
    sent: int
    hands_on: bool
    tied: int
    tied_trained: int

    @property
    def kept(self) -> int:
        return self.output + sum(run.count * run.layer.kept for run in self.runs)

    @property
    def deferred(self) -> int:
        """Bytes that a pass still keeps until its weight-gradient pass."""
        return sum(run.count * run.layer.deferred for run in self.runs)


class LayoutMemory:
    def __init__(self, config: Config, device: str, keeps: Keeps) -> None:
        self._config, self._keeps = config, keeps
        self._size = ModelSize(config)
        parallel, train, precision = config.parallel, config.train, config.precision
        count = train.gradient_accumulation_steps
        self._flights = flights_of(parallel.pipeline_schedule, parallel.pp, parallel.stage_chunks, count)
        replayed = self._size.weights.recomputed(train.recompute, train.recompute_every)
        self._layers = LayerMemory(config, device, keeps, self._size.weights, replayed)
        self._repeated = count > 1
        # A GPU's allocator keeps the gradients of the previous step; else they grow as a backward pass makes them.
        self._gradients_grow = count == 1 and device == "cpu"
        # Bytes per element of compute weights, of master weights, and of a weight gradient that a backward pass
        # computes; 0 if it adds to the sum at once.
        self._narrow, self._wide = precision.itemsize, precision.master_itemsize
        self._computed = 0 if keeps.kernels.gradients_in_place else precision.itemsize
        self._zero, self._shards = parallel.zero, max(1, self._size.largest_place(0).zero.count)

    def peak(self, pp_rank: int) -> StageMemory:
        """Return the memory of the largest rank at a pp coordinate."""
        config, size, place = self._config, self._size, self._size.largest_place(pp_rank)
        held = size.weights.held(size.layers_of_rank(pp_rank), place.unshared)
        sections, grow = (config.parallel, config.precision), self._gradients_grow
        states = standing_states(size.rank(pp_rank, place), held.all, *sections, self._keeps, grow, held.frozen)
        levels = 0
        if config.train.exact:  # keeps a gradient sum for each level of its tree besides the growing one
            levels = (config.train.grain_samples // config.parallel.dp).bit_length() - 1
        moment = max(self._moments(pp_rank), key=lambda moment: moment.total)
        left = self._layers.narrow_logits if moment.logits else 0
        lost = moment.activations + moment.working + moment.logits + moment.buffers + left
        return StageMemory(
            pp_rank,
            int(states.weights + moment.weights),
            int(states.gradients + levels * held.trained * self._wide + moment.gradients),
            int(states.optimizer),
            int(moment.activations),
            int(moment.working),
            int(moment.logits),
            int(moment.buffers),
            int(self._keeps.fragmentation * lost) + left,
            left,
        )

    def _moments(self, pp_rank: int) -> Iterator[Moment]:
        """Yield a rank's moments, relative to its memory from the first micro-batch to the update, without ZeRO's
        gathers."""
        stages = [self._stage(number, pp_rank) for number in self._size.map.held_by(pp_rank)]
        flights = self._flights[pp_rank]
        kept = flights.held @ np.array([stage.kept for stage in stages], dtype=float)
        kept += flights.deferred @ np.array([stage.deferred for stage in stages], dtype=float)
        kept += flights.sent * max(stage.sent for stage in stages)
        for place, stage in enumerate(stages[:-1]):
            if stage.hands_on:  # a rank's stages share the output that one hands to the next
                kept -= stage.output * np.minimum(flights.held[:, place], flights.held[:, place + 1])
        for (kind, place), actions in flights.alike.items():
            most = int(kept[actions].max())
            for moment in self._of_action(stages[place], kind):
                yield moment.plus(activations=most)
        if self._zero == 1:  # at the end of a step the first group of gradients is reduce-scattered
            whole = self._size.largest_place(pp_rank).unshared
            groups = self._size.gathered_together(pp_rank, whole, trained=True)
            largest = max(map(sum, groups))
            new = sum(map(sum, groups)) * self._wide if self._gradients_grow else 0
            yield Moment(buffers=largest * self._wide, weights=-largest * self._narrow, gradients=new)

    def _stage(self, number: int, pp_rank: int) -> StageLayers:
        weights, layers = self._size.weights, self._size.layers_of(number)
        whole = self._size.largest_place(pp_rank).unshared
        together = weights.sharing(layers)
        runs = []
        for (_, layer), alike in groupby(layers, key=lambda name: (weights.kinds[name], self._layers.of(name))):
            names = list(alike)
            held = weights.held([] if names[0] in together else names[:1], whole)
            ends = names[-1] == weights.plan.layers[-1], names[0] == weights.plan.layers[0]
            runs.append(Run(layer, len(names), held.all, held.trained, *ends))
        outer, ranks = self._layers.output, self._size.map.ranks
        is_last = number == len(ranks) - 1
        hands_on = not is_last and ranks[number + 1] == pp_rank
        tied = weights.held(together, whole)
        return StageLayers(
            tuple(runs), 0 if is_last else outer, outer if number else 0, hands_on, tied.all, tied.trained
        )

    def _of_action(self, stage: StageLayers, kind: str) -> Iterator[Moment]:
        """Yield the largest moments of an action (`F`, `B`, `I` or `W`), relative to all that it begins with."""
        if kind == "F":  # the peak is at the end
            last = stage.runs[-1]
            gathered = self._narrow * (last.elements + stage.tied) if self._zero == ZERO_WEIGHTS else 0
            yield Moment(logits=last.layer.forward if last.is_head else 0, weights=gathered)
        elif kind == "W":
            blocks = (run.layer.largest for run in stage.runs if not run.is_embedding or len(stage.runs) == 1)
            yield Moment(activations=stage.deferred, gradients=self._computed * max(blocks))
        else:
            yield from self._backward(stage, kind == "I")

    def _backward(self, stage: StageLayers, deferring: bool) -> Iterator[Moment]:
        """Yield the candidates for the peak of a backward pass; weight gradients wait for a separate pass if
        `deferring`."""
        scattered: float = 0  # last
        if self._zero > 1 and self._repeated:
            scattered = stage.tied_trained or next((run.trained for run in stage.runs if run.trained), 0)
        freed, tied, reduced = 0.0, 0.0, 0.0  # a tied weight has one gradient once both of its uses have theirs
        for place in range(len(stage.runs) - 1, -1, -1):
            run, layer = stage.runs[place], stage.runs[place].layer
            # Torch prefetches the previous layer, but not the embeddings, whose backward pass needs no weights.
            before = stage.runs[place - 1].elements if place and not stage.runs[place - 1].is_embedding else 0
            each = layer.kept - (layer.deferred if deferring else 0)
            trained = run.trained + (stage.tied_trained if run.is_head or run.is_embedding else 0)
            for number in sorted({0, max(0, run.count - 2), run.count - 1}):
                ahead = run.elements if number < run.count - 1 else before
                if number:
                    scattered = run.trained
                start = Moment(activations=-(freed + number * each), gradients=self._computed * tied)
                if self._zero > 1:
                    start = start.plus(buffers=scattered * self._wide)
                if self._zero == ZERO_WEIGHTS:
                    gathered = (run.elements + stage.tied) * self._narrow
                    start = start.plus(weights=gathered, buffers=ahead * self._narrow)
                new = 0.0  # gradients that the pass allocates, where they do not exist already
                if self._zero and self._gradients_grow:
                    new = (reduced + number * run.trained) * self._wide / (1 if self._zero == 1 else self._shards)
                for moment in self._of_layer(run, start, trained, scattered, deferring):
                    yield moment.plus(gradients=new)
            freed += run.count * each
            reduced += run.count * run.trained
            scattered = run.trained or scattered
            tied = layer.table or layer.largest or (run.count and stage.tied_trained) if run.is_head else tied

    def _of_layer(self, run: Run, start: Moment, trained: int, scattered: float, deferring: bool) -> Iterator[Moment]:
        """Yield the moments of one layer's backward pass, from its start, its trained elements with tied ones, and the
        elements whose reduce-scatter still holds its buffer."""
        layer = run.layer
        largest = 0 if deferring and not run.is_embedding else self._computed * layer.largest
        yield start.plus(gradients=largest, **{"logits" if run.is_head else "working": layer.backward})
        if run.is_head and not deferring:  # the weight's gradient, once the probabilities are freed
            computed = self._computed * (2 * layer.table or trained)
            yield start.plus(activations=-layer.kept, logits=layer.ending, gradients=computed)
        if self._zero:
            ended = start.plus(activations=-layer.kept, working=layer.ending, gradients=self._computed * trained)
            yield ended
            if self._zero > 1:
                freed_weights = run.elements * self._narrow if self._zero == ZERO_WEIGHTS else 0
                buffers = trained * self._wide * (1 + 1 / self._shards) - scattered * self._wide
                yield ended.plus(weights=-freed_weights, working=-layer.ending, buffers=buffers)


def standing_states(
    found: RankSize,
    whole: int,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    keeps: Keeps,
    gradients_grow: bool,
    frozen: int = 0,
) -> RankSize:
    """Return a rank's memory from the first micro-batch to the update, without ZeRO's per-layer gathers, from the peak
    of its states in a step and the elements of its whole weights, `frozen` of them frozen; no gradients exist before
    the backward pass if they grow."""
    wide = precision.master_itemsize
    narrow = precision.itemsize if precision.itemsize < wide else 0
    trained = found.parameters - found.frozen
    added = precision.itemsize if precision.dtype in keeps.system.narrow_gradients else wide
    if not parallel.zero:
        if keeps.system.sharded_optimizer:
            replicas = parallel.dp * parallel.cp
            weights = found.frozen * precision.itemsize + trained * narrow + trained * wide // replicas
            found = found._replace(weights=weights, optimizer=found.optimizer // replicas)
        return found._replace(gradients=trained * added)
    gathered = (whole - frozen) * precision.itemsize if parallel.zero < 3 else 0
    gradients = 0 if gradients_grow else (whole - frozen if parallel.zero == 1 else trained) * added
    weights = trained * wide + found.frozen * precision.itemsize + gathered
    return found._replace(weights=weights, gradients=gradients)


_ROUNDS: Final = 4
"""Rounds of pp micro-batches after which memory no longer grows, unless the schedule holds all micro-batches."""


class Flights(NamedTuple):
    """Passes that a rank holds when each of its actions begins.

    `held` are those whose activations wait for their backward pass, including the action's own, [actions, stages];
    `deferred` those that wait for their weight gradients, excluding the action's own, [actions, stages]; `sent` the
    gradients sent to earlier stages whose memory is not free yet, [actions]. `alike` has the indices of the actions of
    each kind and stage of the rank.
    """

    held: NDArray[np.int64]
    deferred: NDArray[np.int64]
    sent: NDArray[np.int64]
    alike: dict[tuple[str, int], list[int]]


def flights_of(schedule: StageSchedule, pp: int, chunks: int, micro_batches: int) -> tuple[Flights, ...]:
    if pp == 1:
        return (_of_rank((Action(0, "F", 0), Action(0, "B", 0)), (0,), 0),)
    rounds = micro_batches // pp
    if rounds > _ROUNDS and schedule.micro_batches is None and schedule.in_flight(pp, 0, chunks) is not None:
        fewer = _ROUNDS * (micro_batches // rounds)  # with rounds of the same length
        micro_batches = fewer if schedule.accepts(pp, fewer) else micro_batches
    return _flights_of(schedule, pp, chunks, micro_batches)


@lru_cache(maxsize=4096)
def _flights_of(schedule: StageSchedule, pp: int, chunks: int, micro_batches: int) -> tuple[Flights, ...]:
    orders, ranks = orders_of(schedule, pp, chunks, micro_batches), schedule.stage_ranks(pp, chunks)
    under_way = SENDS_UNDER_WAY if schedule.sends_apart else 0
    return tuple(_of_rank(order, ranks, under_way) for order in orders)


def _of_rank(order: tuple[Action, ...], ranks: Sequence[int], under_way: int) -> Flights:
    places = {stage: place for place, stage in enumerate(sorted({action.stage for action in order}))}
    alike: dict[tuple[str, int], list[int]] = {}
    held, deferred = (np.zeros((len(order) + 1, len(places)), dtype=int) for _ in range(2))
    # With blocking sends the stage still references the last gradient that it has sent.
    sent = np.full(len(order), int(not under_way and any(action.stage for action in order)), dtype=int)
    sends: deque[bool] = deque(maxlen=under_way)
    for number, (stage, kind, _) in enumerate(order):
        place = places[stage]
        alike.setdefault((kind, place), []).append(number)
        if kind == "F":
            held[number, place] += 1
        elif kind == "W":
            deferred[number, place] -= 1
        else:
            held[number + 1, place] -= 1
            deferred[number + 1, place] += kind == "I"
        sent[number] += sum(sends)
        to = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and 0 <= to < len(ranks) and ranks[to] != ranks[stage]:
            sends.append(kind != "F")
    return Flights(held.cumsum(axis=0)[:-1], deferred.cumsum(axis=0)[:-1], sent, alike)

"""Peak memory of each pipeline stage by cause, computed without torch; `stage_memory` is the entry point."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import groupby
from math import ceil
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from threefold.config import Config, resolve
from threefold.config.model import OWN
from threefold.config.resolve import default_largest
from threefold.config.rules import default_micro_batches
from threefold.config.schedules import SENDS_UNDER_WAY, Action, Schedule
from threefold.config.schema import ParallelConfig, PrecisionConfig
from threefold.errors import UserError
from threefold.planner.activations import BlockSizes, block_bytes, block_sizes, head_bytes
from threefold.planner.layer_memory import GradientSharing, LayerMemory, Moment, Run, backward_moments, forward_moment
from threefold.planner.model_size import ModelSize, RankSize
from threefold.planner.schedule import orders_of
from threefold.planner.systems import Keeps, keeps_of

RESERVE: Final = 2 << 30
"""Bytes of GPU memory that tensors cannot use: the CUDA context and cuBLAS workspaces (some 0.7 GiB), and NCCL buffers
(some 0.2 GiB for each of a handful of groups)."""


@dataclass(frozen=True)
class StageMemory:
    """Memory by cause of one pipeline rank at the peak of a step, in bytes.

    Attributes:
        pp_rank: coordinate of the rank on the pp axis.
        weights: master and compute weights, including gathered ones (ZeRO).
        gradients, optimizer: weight gradients, and optimizer state.
        activations: activations kept for the backward passes of all micro-batches in flight.
        working: transient memory of a block: gradients of activations and recomputed activations.
        logits: transient memory of the head: logits, probabilities and their gradients.
        buffers: buffers of collectives: ZeRO's gathers and reduce-scatters, and receives.
        fragmentation: memory that the allocator cannot use between tensors.
        given_back: part of `fragmentation` that the allocator releases if memory runs out: blocks that no tensor fits.
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
        """Bytes by name of the cause."""
        return {name: value for name, value in asdict(self).items() if name not in ("pp_rank", "given_back")}

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


def usable_bytes(memory_bytes: int) -> int:
    """Return the bytes of GPU memory that tensors can use."""
    return memory_bytes - RESERVE


def stage_memory(config: Config, device: str = "cuda", system: str = "own") -> list[StageMemory]:
    """Return the peak memory of each pipeline rank; among the ranks at one pp coordinate, that of the largest.

    Args:
        config: resolved config of the run.
        device: `cpu` or `cuda`, whose kernels keep different tensors.
        system: name of the training system, as `planner.systems` knows it.

    Raises:
        UserError: the layers cannot be partitioned into stages as configured, the schedule does not support this number
            of micro-batches, or the model comes from a file, whose layers have no formulas.
    """
    if config.model.architecture == OWN:
        raise UserError(
            f"model.architecture is {OWN}, whose activations have no formulas; use threefold dry-run, which runs it."
        )
    layout = LayoutMemory(config, device, keeps_of(system, device))
    found = []
    for rank in range(config.parallel.pp):
        states, moment = layout.peak(rank)
        left = layout.narrow_logits if moment.logits else 0
        passing = moment.activations + moment.working + moment.logits + moment.buffers
        found.append(
            StageMemory(
                rank,
                int(states.weights + moment.weights),
                int(states.gradients + moment.gradients),
                int(states.optimizer),
                int(moment.activations),
                int(moment.working),
                int(moment.logits),
                int(moment.buffers),
                int(layout.keeps.fragmentation * (passing + left)) + left,
                left,
            )
        )
    return found


@dataclass(frozen=True)
class StageRuns:
    """Memory-relevant description of a stage.

    Attributes:
        runs: layers of the stage, grouped.
        output: bytes of its output, which a pass also keeps; 0 for the last stage.
        sharing: treatment of its gradients and weights.
        gradient: elements of its largest weight gradient.
        sent: bytes of the gradient that it sends to the previous stage; 0 for the first stage.
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
        """Bytes that a pass still keeps until its weight-gradient pass."""
        return sum(run.count * run.layer.deferred for run in self.runs)


class LayoutMemory:
    """Memory of the ranks of a layout.

    Args:
        config: resolved config of the run.
        device: `cpu` or `cuda`.
        keeps: memory behaviour of the training system.

    Raises:
        UserError: see `stage_memory`.
    """

    def __init__(self, config: Config, device: str, keeps: Keeps) -> None:
        self._config, self.keeps = config, keeps
        self.size = ModelSize(config)
        parallel, train = config.parallel, config.train
        self._micro_batches = train.gradient_accumulation_steps
        self._flights = flights_of(parallel.pipeline_schedule, parallel.pp, parallel.stage_chunks, self._micro_batches)
        replayed = self.size.weights.recomputed(train.recompute, train.recompute_every)
        self._layers = LayerMemory(config, device, keeps, self.size.weights.plan.layers, replayed)
        # A GPU's allocator keeps the gradients of the previous step.
        self._gradients_grow = self._micro_batches == 1 and device == "cpu"

    @property
    def narrow_logits(self) -> int:
        """Bytes of logits that are cast to fp32 for the loss; 0 where none are."""
        return self._layers.narrow_logits

    def peak(self, pp_rank: int) -> tuple[RankSize, Moment]:
        """Return a rank's standing memory and, relative to it, its largest moment."""
        stages = [self._stage(number, pp_rank) for number in self.size.map.held_by(pp_rank)]
        states, moments = self._states(pp_rank), list(self._moments(pp_rank, stages))
        return states, max(moments, key=lambda moment: moment.total)

    def _moments(self, pp_rank: int, stages: Sequence[StageRuns]) -> Iterator[Moment]:
        flights = self._flights[pp_rank]
        kept = flights.held @ np.array([stage.kept for stage in stages], dtype=float)
        kept += flights.deferred @ np.array([stage.deferred for stage in stages], dtype=float)
        kept += flights.sent * max(stage.sent for stage in stages)
        for place, stage in enumerate(stages[:-1]):
            if stage.hands_on:  # a rank's stages share the output that one hands to the next
                kept -= stage.output * np.minimum(flights.held[:, place], flights.held[:, place + 1])
        for (kind, place), actions in flights.alike.items():
            most = int(kept[actions].max())
            for moment in _of_action(kind, stages[place]):
                yield moment.plus(activations=most)
        yield from self._reduction(pp_rank)

    def _reduction(self, pp_rank: int) -> Iterator[Moment]:
        """Yield the end of a step with ZeRO 1, where the first group of gradients is reduce-scattered."""
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
        """Return the memory held from the first micro-batch to the update, without ZeRO's per-layer gathers."""
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
    """Return a rank's memory from the first micro-batch to the update, without ZeRO's per-layer gathers.

    Args:
        found: peak of the rank's states in a step.
        whole: elements of its weights before ZeRO shards them.
        parallel, precision: sections of a resolved config.
        keeps: memory behaviour of the training system.
        gradients_grow: whether no gradients exist before the backward pass.
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
    """Yield the largest moments of an action, relative to everything held when it begins."""
    if kind == "F":
        yield forward_moment(stage.runs, stage.sharing)
    elif kind == "W":
        yield Moment(activations=stage.deferred, gradients=stage.sharing.gradient(stage.gradient))
    else:
        yield from backward_moments(stage.runs, stage.sharing, kind == "I")


_ROUNDS: Final = 4
"""Rounds of pp micro-batches after which memory no longer grows, unless the schedule holds all micro-batches."""


class Flights(NamedTuple):
    """Passes that a rank holds when each of its actions begins.

    Attributes:
        held: passes whose activations wait for their backward pass, including the action's own, [actions, stages].
        deferred: passes that wait for their weight gradients, excluding the action's own, [actions, stages].
        sent: gradients sent to earlier stages whose memory is not free yet, [actions].
        alike: indices of the actions of each kind and stage of the rank.
    """

    held: NDArray[np.int64]
    deferred: NDArray[np.int64]
    sent: NDArray[np.int64]
    alike: dict[tuple[str, int], list[int]]


def flights_of(schedule: Schedule, pp: int, chunks: int, micro_batches: int) -> tuple[Flights, ...]:
    """Return what each pipeline rank holds during a step.

    Args:
        schedule: pipeline schedule of the config.
        pp, chunks, micro_batches: pipeline ranks, stages per rank, and micro-batches of a step.

    Raises:
        UserError: the schedule does not support these numbers.
    """
    if pp == 1:
        return (
            Flights(
                np.ones((2, 1), dtype=int),
                np.zeros((2, 1), dtype=int),
                np.zeros(2, dtype=int),
                {("F", 0): [0], ("B", 0): [1]},
            ),
        )
    rounds = micro_batches // pp
    if rounds > _ROUNDS and schedule.micro_batches is None and schedule.in_flight(pp, 0, chunks) is not None:
        fewer = _ROUNDS * (micro_batches // rounds)  # with rounds of the same length
        micro_batches = fewer if schedule.accepts(pp, fewer) else micro_batches
    return _flights_of(schedule, pp, chunks, micro_batches)


@lru_cache(maxsize=4096)
def _flights_of(schedule: Schedule, pp: int, chunks: int, micro_batches: int) -> tuple[Flights, ...]:
    orders, ranks = orders_of(schedule, pp, chunks, micro_batches), schedule.stage_ranks(pp, chunks)
    under_way = SENDS_UNDER_WAY if schedule.sends_apart else 0
    return tuple(_of_rank(order, ranks, under_way) for order in orders)


def _of_rank(order: tuple[Action, ...], ranks: Sequence[int], under_way: int) -> Flights:
    places = {stage: place for place, stage in enumerate(sorted({action.stage for action in order}))}
    alike: dict[tuple[str, int], list[int]] = {}
    held, deferred = (np.zeros((len(order) + 1, len(places)), dtype=int) for _ in range(2))
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
    sent = _gradients_under_way(order, ranks, under_way)
    return Flights(held.cumsum(axis=0)[:-1], deferred.cumsum(axis=0)[:-1], sent, alike)


def _gradients_under_way(order: Sequence[Action], ranks: Sequence[int], under_way: int) -> NDArray[np.int64]:
    """Count the gradients among the last `under_way` sends before each action. With blocking sends it is the last one,
    which the stage still references."""
    if not under_way:
        last = any(action.stage for action in order)
        return np.full(len(order), int(last), dtype=int)
    sends: deque[bool] = deque(maxlen=under_way)
    sent = np.zeros(len(order), dtype=int)
    for number, (stage, kind, _) in enumerate(order):
        sent[number] = sum(sends)
        to = stage + 1 if kind == "F" else stage - 1
        if kind != "W" and 0 <= to < len(ranks) and ranks[to] != ranks[stage]:
            sends.append(kind != "F")
    return sent


_SCATTERED = {"cpu": 1.4, "cuda": 1.0}
"""Factor of activation memory over its bytes, as measured: the C library (`host`) keeps memory between tensors."""


def largest_micro_batch(config: Config, vocab_size: int, memory: int, device: str) -> int:
    """Return the largest default micro-batch whose step fits into a rank's memory, or the smallest if none does.

    Args:
        config: loaded and valid config.
        vocab_size: vocabulary size of the data's tokenizer.
        memory: bytes that a rank may use.
        device: `cpu` or `cuda`.
    """
    resolved = resolve(config, vocab_size)
    size = ModelSize(resolved)
    sizes = resolved.model.vocab_size, resolved.data.sequence_length, resolved.parallel
    largest = default_largest(*sizes, config.train.loss_chunk_size is not None, device)
    micro_batches = default_micro_batches(resolved)
    for micro_batch in (each for each in micro_batches if each <= largest):
        tried = resolve(config, vocab_size, largest_micro_batch=micro_batch)
        if step_bytes(tried, device, size) <= memory:
            return micro_batch
    return micro_batches[-1]


def step_bytes(config: Config, device: str, size: ModelSize | None = None) -> int:
    """Return the most bytes that any rank needs for a step, without communication buffers.

    Args:
        config: resolved config of the run.
        device: `cpu` or `cuda`, whose attention keeps different tensors.
        size: size of the same model in the same layout, if known.
    """
    size = size or ModelSize(config)
    scattered = _SCATTERED[device]
    return max(
        size.largest_rank(rank).bytes + int(scattered * activation_bytes(config, device, size, rank))
        for rank in range(config.parallel.pp)
    )


def activation_bytes(config: Config, device: str, size: ModelSize, pp_rank: int) -> int:
    """Return the peak bytes of a pipeline rank's kept activations and temporary buffers.

    Args:
        config, device, size: see `step_bytes`.
        pp_rank: coordinate of the rank on the pp axis.
    """
    train = config.train
    layers = [name for stage in size.stages() if stage.pp_rank == pp_rank for name in stage.layers]
    blocks = [f"blocks.{number}" for number in range(config.model.num_layers)]
    replayed = size.weights.recomputed(train.recompute, train.recompute_every)
    kept = moment = 0
    for name in layers:
        block = block_sizes(config, device, int(name.partition(".")[2]) if name in blocks else 0)
        outer = block.own_tokens * block.hidden * block.itemsize
        if name in blocks:
            kept += block_bytes(block, train.recompute if name in replayed else "none")
            moment = max(moment, block_bytes(block))  # its gradients, or its recomputed activations
        elif name == "head":
            kept += outer + head_bytes(block, config.model.vocab_size, train.loss_chunk_size)
            moment = max(moment, 2 * _logits(config, block))
        else:
            kept += block.tokens * 8 + outer * (2 if config.model.embedding_dropout else 1)
    return ceil(kept * _under_way(config, pp_rank)) + moment


def _logits(config: Config, block: BlockSizes) -> int:
    """Return the bytes of the logits that the head holds at once."""
    columns = -(-config.model.vocab_size // config.parallel.tp)
    return block.tokens * min(columns, config.train.loss_chunk_size or columns) * block.wide


def _under_way(config: Config, pp_rank: int) -> float:
    """Return the micro-batches that a rank keeps at once, including those with deferred weight gradients."""
    parallel, batches = config.parallel, config.train.gradient_accumulation_steps
    if parallel.pp == 1:
        return 1
    held = parallel.pipeline_schedule.in_flight(parallel.pp, pp_rank, parallel.stage_chunks)
    return batches if held is None else min(held, batches)

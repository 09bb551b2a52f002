"""Cost model of the search: exact estimates of one layout, and lower bounds of the memory and time of many at once."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from threefold.comm.layout import Coordinates
from threefold.config.resolve import logits_chunk
from threefold.config.schedules import StageSchedule, find_schedule
from threefold.config.schema import Config, ParallelConfig
from threefold.config.section import divisors
from threefold.errors import UserError
from threefold.files import format_bytes
from threefold.parallel.pipeline.partition import StageMap, partitioned
from threefold.planner import cost, layer_cost
from threefold.planner.activations import LayerMemory
from threefold.planner.block import BlockShape
from threefold.planner.estimate import (
    estimate,
    gradient_time,
    layer_elements,
    sent_bytes,
    update_time,
    usable_memory,
    waiting_share,
)
from threefold.planner.hardware import Hardware
from threefold.planner.model_size import (
    ZERO_STATE,
    ZERO_WEIGHTS,
    RankSize,
    ShardCoordinates,
    average_states,
    model_weights,
    optimizer_states,
    shard_coordinates,
)
from threefold.planner.space import LayoutChoice, MeshSizes, Options, Settings, in_layout
from threefold.planner.stage_memory import standing_states
from threefold.planner.systems import Keeps, System, keeps_of

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Evaluated:
    """Layout with its estimated time and memory.

    `peak_bytes` has the largest rank at each pp coordinate, and `limits` the causes that take most of a step, the
    largest first, each with its fraction of the step; `details` are further figures for `--json`.
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
        return max(self.peak_bytes)


class LayerKinds:
    """Kinds of a model's layers, numbered from 0, the first layer's; layers of a kind cost the same.

    `of_layer` has the kind of each layer, `first` the first layer of each kind, `head` the kind of the last layer, and
    `blocks` the kinds of blocks, each with the index of its first block.
    """

    def __init__(self, blocks: Sequence[BlockShape]) -> None:
        numbers: dict[object, int] = {}
        self.of_layer: list[int] = []
        self.first: list[int] = []
        for layer, key in enumerate(("embedding", *blocks, "head")):
            kind = numbers.setdefault(key, len(numbers))
            if kind == len(self.first):
                self.first.append(layer)
            self.of_layer.append(kind)
        self.count, self.head, last = len(self.first), self.of_layer[-1], len(self.of_layer) - 1
        self.blocks = [(kind, layer - 1) for kind, layer in enumerate(self.first) if 0 < layer < last]


@dataclass(frozen=True)
class RankLayers:
    """Distinct ranks under each schedule of a mesh, one per row.

    `starts` has the first row of each schedule, `schedule` each row's, and `chunks` the stages per rank of each
    schedule. A rank holds layers of each kind: `counts`, [rows, kinds], and in its n smallest stages `smallest`, [rows,
    n from 0 on, kinds]. At its peak it holds at least `passes` through a stage, infinite for all of a step, at most
    `deferred` of which only wait for their weight gradients. Two consecutive stages are on the same rank if `folded`.
    """

    starts: NDArray[np.int64]
    schedule: NDArray[np.int64]
    counts: Array
    smallest: Array
    passes: Array
    deferred: Array
    folded: Mask
    chunks: Array


def _passes(schedule: StageSchedule, pp: int, rank: int, chunks: int) -> tuple[float, float]:
    """Return the passes that a rank holds at once, and at most how many of them only wait for weight gradients."""
    if pp == 1:
        return 1.0, 0.0
    # Where weight gradients are deferred the table has an upper bound; all ranks hold as many as the first.
    flight = schedule.in_flight(pp, 0 if schedule.defers_weight_gradients else rank, chunks)
    if flight is None:
        return float("inf"), 0.0
    if not schedule.defers_weight_gradients:
        return flight * chunks, 0.0
    return max(1.0, flight * chunks - 1), float(rank)


_KEPT, _BACKWARD, _DEFERRED = range(3)


def _held(mesh: MeshSizes, ranks: RankLayers, micro_batches: Array) -> tuple[Array, Array]:
    """Return a lower bound of what ranks hold of all passes in flight, as many as possible through the smallest stages:
    layers of each kind, [rows, micro, kinds], and outputs that stages pass on, [rows, micro], once for each pass."""
    chunks = ranks.chunks[ranks.schedule][:, None]
    rounds = micro_batches // np.maximum(1, micro_batches // mesh.pp)
    # The table counts rounds of pp micro-batches, but a round may be shorter.
    passes = ranks.passes[:, None] - (chunks - 1) * np.maximum(0, mesh.pp - rounds)
    passes = np.clip(passes, 1, micro_batches * chunks)
    # A stage holds two rounds of its micro-batches and the beginning of a third, or all of them if those are fewer.
    room = np.maximum(np.minimum(micro_batches, 2 * rounds + mesh.pp), passes / chunks)
    full = np.minimum(passes // room, chunks).astype(int)
    rows, most = np.arange(len(ranks.counts))[:, None], ranks.smallest.shape[1] - 1
    before, after = (ranks.smallest[rows, np.minimum(full + more, most)] for more in (0, 1))
    layers = room[..., None] * before + (passes - room * full)[..., None] * (after - before)
    has_last = (ranks.counts[:, -1] > 0)[:, None]
    # The last stage runs backward at once, so that few of its passes are held where others can make up the number.
    several = (chunks > 1) & np.isfinite(ranks.passes[:, None])
    layers[..., -1] = np.where(several, np.minimum(layers[..., -1], 1), layers[..., -1])
    handed = np.where(ranks.folded[:, None], 0, passes)  # an output handed to a stage of the same rank exists once
    return layers, np.where(has_last, np.maximum(0, handed - room), handed)


class LeastBytes:
    """Lower bounds of the memory of one resolved config, given on one rank, on one type of device."""

    def __init__(self, config: Config, device: str, keeps: Keeps, kinds: LayerKinds) -> None:
        self._config, self._device, self._keeps, self._kinds = config, device, keeps, kinds
        # Kinds of layers do not tell frozen weights apart. With some, all count as frozen, which is a lower bound.
        self._frozen = bool(config.optimizer.frozen or config.adapter.rank)
        self._weights = model_weights(config)
        self._names = [self._weights.plan.layers[layer] for layer in kinds.first]
        self._states = tuple(each + average_states(config) for each in optimizer_states(config.optimizer, min))
        self._largest = config.train.global_batch_size
        self._held: dict[ShardCoordinates, Array] = {}
        self._layers: dict[object, Array] = {}

    def __call__(self, mesh: MeshSizes, options: Options, ranks: RankLayers) -> Array:
        """Return a lower bound of the largest rank's bytes, in all dims."""
        sizes = np.array([each["train.micro_batch_size"] for each in options.micro_batch])
        modes = [each["train.recompute"] for each in options.recompute]
        shards = [each["parallel.sequence_parallel"] for each in options.sequence_parallel]
        counts = mesh.sequences // sizes
        states = self._states_of(mesh, options, ranks, False)[:, None, :]  # [rows, micro, zero]
        if self._device == "cpu":
            growing = self._states_of(mesh, options, ranks, True)[:, None, :]
            states = np.where((counts == 1)[:, None], growing, states)
        held = _held(mesh, ranks, counts)
        buffers = self._buffers(mesh, options, ranks, counts)  # [rows, micro, zero]
        found = np.empty(options.shape)
        for sequence, sharded in enumerate(shards):
            for place, mode in enumerate(modes):
                activations = self._moving(mesh, ranks, sizes, held, sharded, mode)  # [rows, micro]
                moving = (activations[:, :, None] + buffers) * (1 + self._keeps.fragmentation)
                most = np.maximum.reduceat(moving + states, ranks.starts, axis=0)  # [schedule, micro, zero]
                found[:, sequence, place] = most.transpose(1, 0, 2)
        return found

    def _moving(
        self, mesh: MeshSizes, ranks: RankLayers, sizes: Array, held: tuple[Array, Array], sharded: bool, mode: str
    ) -> Array:
        """Return the activations plus the largest working set of a layer's backward pass, [rows, micro]."""
        one, two, last = (self._of_kinds(mesh, size, sharded, mode) for size in (1, 2, self._largest))
        # Memory that grows faster than the batch lies above the line through the first two sizes, and slower growth
        # above the chord.
        growth = np.minimum(two - one, (last - one) / max(1, self._largest - 1))
        each = one[..., None] + growth[..., None] * (sizes - 1)  # [kept, backward, deferred; kinds, output; micro]
        layers, output = each[:, :-1], each[_KEPT, -1]
        kept = np.einsum("rmk,km->rm", held[0], layers[_KEPT]) + held[1] * output
        waiting = np.einsum("rmk,km->rm", held[0], np.minimum(layers[_KEPT], layers[_DEFERRED]))
        backward = np.where((ranks.counts > 0)[..., None], layers[_BACKWARD], np.inf).min(axis=1)
        return np.where(ranks.deferred[:, None] > 0, waiting, kept) + backward

    def _buffers(self, mesh: MeshSizes, options: Options, ranks: RankLayers, micro_batches: Array) -> Array:
        """Return ZeRO's bytes of one layer's gathered weights and unreduced gradients, [rows, micro, zero]."""
        narrow, wide = self._config.precision.itemsize, self._config.precision.master_itemsize
        layers = self._table(_sharding(mesh, 0)[1])[:-1].sum(axis=1)
        least = np.where(ranks.counts > 0, layers, np.inf).min(axis=1)[:, None]
        repeated = np.where((micro_batches > 1) & (not self._frozen), least * wide, 0)
        columns = []
        for settings in options.zero:
            zero = settings["parallel.zero"]
            gathered = least * narrow if zero == ZERO_WEIGHTS else 0
            columns.append(gathered + (repeated if zero > ZERO_STATE else np.zeros_like(repeated)))
        return np.stack(columns, axis=-1)

    def _of_kinds(self, mesh: MeshSizes, size: int, sharded: bool, mode: str) -> Array:
        """Return the bytes of a layer of each kind and of a block's output, [kept, backward, deferred; kinds and 1]."""
        key = mesh.tp, mesh.cp, mesh.ep, size, sharded, mode
        if key in self._layers:
            return self._layers[key]
        choice = LayoutChoice(mesh.dp, mesh.tp, mesh.pp, mesh.cp, mesh.ep, 0, "1f1b", 1, size, 1, mode, sharded)
        config = in_layout(self._config, choice)
        chunks = [config.train.loss_chunk_size]
        if "train.loss_chunk_size" in self._config.derived:
            chunks = [0, 1]  # other chunk sizes lie between these two
        memories, replayed = [], self._weights.recomputed(mode, 1)
        for chunk in chunks:
            changed = config.model_copy(update={"train": config.train.model_copy(update={"loss_chunk_size": chunk})})
            memories.append(LayerMemory(changed, self._device, self._keeps, self._weights, replayed))
        rows = [[each.kept, each.backward, each.deferred] for each in map(memories[0].of, self._names[:-1])]
        heads = [memory.of(self._names[-1]) for memory in memories]
        head = np.min([[each.kept, each.backward, each.deferred] for each in heads], axis=0)
        self._layers[key] = np.array([*rows, head, [memories[0].output, 0, 0]], dtype=float).T
        return self._layers[key]

    def _states_of(self, mesh: MeshSizes, options: Options, ranks: RankLayers, grow: bool) -> Array:
        """Return the bytes of standing states, [rows, zero]; with `grow`, the backward pass makes the gradients."""
        precision = self._config.precision
        narrow, wide = precision.itemsize, precision.master_itemsize
        columns = []
        for settings in options.zero:
            zero = settings["parallel.zero"]
            parallel, place = _sharding(mesh, zero)
            has_both = (ranks.counts[:, 0] > 0) & (ranks.counts[:, self._kinds.head] > 0)
            tables = self._table(place), self._table(place.unshared)
            # Elements that a rank holds, in hidden matrices and others, [rows, 2].
            local, whole = (ranks.counts @ table[:-1] - has_both[:, None] * table[-1] for table in tables)
            held: Any = local.sum(axis=1)
            copies = held * narrow if narrow < wide else 0
            size = RankSize(held, held * wide + copies, held * wide, local @ np.array(self._states) * wide)
            gathered: Any = whole.sum(axis=1)
            if self._frozen:
                held = held if zero == ZERO_WEIGHTS else gathered
                size = RankSize(held, held * narrow, 0, 0, held)
            frozen = gathered if self._frozen else 0
            size = standing_states(size, gathered, parallel, precision, self._keeps, grow, frozen)
            columns.append(size.weights + size.gradients + size.optimizer)
        return np.stack(columns, axis=-1)

    def _table(self, place: ShardCoordinates) -> Array:
        """Return the elements of a layer of each kind, and of those that the first and last layer share, in hidden
        matrices and others, [kinds and 1, 2]."""
        if place not in self._held:
            ends = [self._names[0], self._names[self._kinds.head]]
            held = [self._weights.held(names, place) for names in (*([name] for name in self._names), ends)]
            table = np.array([[each.hidden + each.frozen, each.others] for each in held], dtype=float)
            table[-1] = table[0] + table[self._kinds.head] - table[-1]
            self._held[place] = table
        return self._held[place]


def _sharding(mesh: MeshSizes, zero: int) -> tuple[ParallelConfig, ShardCoordinates]:
    """Return a mesh's sizes as a stand-in for a config section, which is slow to validate, and the first rank's
    coordinates."""
    axes = {axis: getattr(mesh, axis) for axis in ("dp", "tp", "pp", "cp", "ep")}
    parallel = cast(ParallelConfig, SimpleNamespace(**axes, zero_shards=mesh.dp, zero=zero))
    return parallel, shard_coordinates(parallel, Coordinates(0, 0, 0, 0))


class ModelCosts:
    """Cost model of a resolved config on one rank, for a hardware and a training system."""

    def __init__(self, config: Config, hardware: Hardware, system: System) -> None:
        self._config, self._hardware, self._system = config, hardware, system
        weights = model_weights(config)
        self._plan, self._kinds = weights.plan, LayerKinds(weights.blocks)
        self._ranks: dict[tuple[int, int], RankLayers] = {}
        keeps = keeps_of(system.name, hardware.device)
        self._seconds = LeastSeconds(config, hardware, system, self._kinds)
        self._bytes = LeastBytes(config, hardware.device, keeps, self._kinds)

    def usable_bytes(self, gpus: int) -> int:
        """Return the memory that a rank may use when there are `gpus` devices."""
        return usable_memory(self._hardware.shared_by(gpus))

    def least_bytes(self, mesh: MeshSizes, options: Options) -> Array:
        """Return a lower bound of the largest rank's bytes for all options of a mesh at once, unsound ones included."""
        return self._bytes(mesh, options, self._rank_layers(mesh.pp, options.schedule))

    def least_seconds(self, mesh: MeshSizes, options: Options, wanted: Mask) -> Array:
        """Return a lower bound of the seconds of a step; arbitrary for options outside the mask `wanted`."""
        ranks = self._rank_layers(mesh.pp, options.schedule)
        first = options.choice(mesh, [0] * len(options.shape))
        elements = np.array(layer_elements(in_layout(self._config, first)))[self._kinds.first]
        return self._seconds(mesh, options, ranks, ranks.counts @ elements, wanted)

    def evaluate(self, choice: LayoutChoice) -> Evaluated:
        found = estimate(in_layout(self._config, choice), self._hardware, self._system)
        causes, needed = {name: seconds for name, seconds in found.time.causes.items() if seconds}, found.needed_bytes
        largest = sorted(causes, key=causes.__getitem__, reverse=True)[:2]
        limits = tuple((name, causes[name] / found.step_seconds) for name in largest)
        details = {"peak_bytes": found.peak_bytes, "needed_bytes": needed, "seconds": causes}
        rates = found.step_seconds, found.tokens_per_second, found.mfu
        return Evaluated(choice, *rates, tuple(needed), limits, details)

    def largest_part(self, choice: LayoutChoice) -> str:
        """Name what takes the most memory on the largest rank, with its size."""
        found = estimate(in_layout(self._config, choice), self._hardware, self._system)
        stage = max(found.stages, key=lambda each: each.peak)
        name = max(stage.causes, key=stage.causes.__getitem__)
        return f"{name} {format_bytes(stage.causes[name])}"

    def _rank_layers(self, pp: int, schedules: Sequence[Settings]) -> RankLayers:
        """Describe the ranks of all schedules of a mesh."""
        key = pp, id(schedules)
        if key in self._ranks:
            return self._ranks[key]
        rows: list[tuple[int, Array, Array, float, float, bool]] = []
        starts: list[int] = []
        blocks = [kind for kind, _ in self._kinds.blocks]
        # Layers of each kind before each layer, starting with a row of zeros.
        before = np.zeros((len(self._kinds.of_layer) + 1, self._kinds.count))
        before[1:] = np.cumsum(np.eye(self._kinds.count)[self._kinds.of_layer], axis=0)
        for number, settings in enumerate(schedules):
            schedule, count = find_schedule(settings["parallel.schedule"]), settings["parallel.stage_chunks"]
            stages = StageMap((0, len(self._plan.layers)), (0,))
            if pp > 1:
                with suppress(UserError):  # an unsound layout has no partition
                    stages = partitioned(self._plan, pp, schedule, count, self._config.parallel.partition, 0)
            bounds = np.array(stages.bounds)
            each = before[bounds[1:]] - before[bounds[:-1]]
            found: dict[bytes, tuple[Array, Array, list[tuple[float, float]]]] = {}
            for rank in range(max(stages.ranks) + 1):
                local = each[[stage for stage, holder in enumerate(stages.ranks) if holder == rank]]
                local = local[np.argsort(local[:, blocks].sum(axis=1), kind="stable")]
                total, stack = local.sum(axis=0), np.concatenate([before[:1], np.cumsum(local, axis=0)])
                found.setdefault(stack.tobytes(), (total, stack, []))[2].append(_passes(schedule, pp, rank, count))
            starts.append(len(rows))
            on_one = count > 1 and any(one == other for one, other in pairwise(stages.ranks))
            for total, stack, flights in found.values():
                most, waiting = (max(each) for each in zip(*flights, strict=True))
                rows.append((number, total, stack, most, waiting, on_one))
        owners, totals, stacks, passes, deferred, folded = zip(*rows, strict=True)
        held = np.array(passes), np.array(deferred), np.array(folded)
        longest = max(map(len, stacks))
        smallest = np.stack([np.pad(each, ((0, longest - len(each)), (0, 0)), mode="edge") for each in stacks])
        chunks = np.array([float(settings["parallel.stage_chunks"]) for settings in schedules])
        self._ranks[key] = RankLayers(np.array(starts), np.array(owners), np.array(totals), smallest, *held, chunks)
        return self._ranks[key]


Sizes = NDArray[np.int64]


class LeastSeconds:
    """Lower bounds of step times of one resolved config, given on one rank, on one type of hardware."""

    def __init__(self, config: Config, hardware: Hardware, system: System, kinds: LayerKinds) -> None:
        self._config, self._hardware, self._system, self._kinds = config, hardware, system, kinds
        self._passes: dict[object, Array] = {}
        self._sizes = np.array(divisors(config.train.global_batch_size))
        self._configs: dict[object, Config] = {}
        self._layers = np.bincount(kinds.of_layer, minlength=kinds.count)

    def __call__(self, mesh: MeshSizes, options: Options, ranks: RankLayers, elements: Array, wanted: Mask) -> Array:
        """Return the seconds of a step, infinite if not `wanted` (in all dims); `elements` are the weights of each
        rank's row."""
        # Wanted values of what the time of one micro-batch depends on (its size, sequence parallelism and recompute),
        # one after another: their indices, and the runs of the last two with their micro-batch sizes.
        asked: Mask = np.any(wanted, axis=(3, 4))
        sizes = np.array([each["train.micro_batch_size"] for each in options.micro_batch])
        indices, parts = [], []
        for sequence, recompute in np.argwhere(asked.any(axis=0)):
            micro = np.flatnonzero(asked[:, sequence, recompute])
            indices.append((micro, np.full_like(micro, sequence), np.full_like(micro, recompute)))
            sharded = options.sequence_parallel[sequence]["parallel.sequence_parallel"]
            parts.append((sharded, options.recompute[recompute]["train.recompute"], sizes[micro]))
        micro, sequences, recomputes = (np.concatenate(each) for each in zip(*indices, strict=True))
        counts = mesh.sequences // sizes[micro]
        found = np.full(options.shape, np.inf)
        hardware = self._hardware.shared_by(mesh.gpus)
        config, system = self._in_layout(mesh), self._system
        line, forward, backward = self._pipeline(mesh, options, ranks, parts, counts, hardware)
        for number, settings in enumerate(options.zero):
            if not wanted[..., number].any():
                continue
            zero = settings["parallel.zero"]
            sums = gradient_time(config, hardware, system, zero, elements[:, None], forward, backward, counts)
            exposed = np.maximum.reduceat(np.broadcast_to(sums, forward.shape), ranks.starts, axis=0)
            update = update_time(config, hardware, system, zero, np.maximum.reduceat(elements, ranks.starts))
            seconds = line + exposed + np.asarray(update)[:, None] + hardware.achievable.step
            found[micro, sequences, recomputes, :, number] = (seconds * (1 + waiting_share(mesh.gpus))).T
        return np.where(wanted, found, np.inf)

    def _in_layout(self, mesh: MeshSizes, sharded: bool = False, mode: str = "none") -> Config:
        """Return the config in a mesh, with micro-batches of one sample."""
        key = mesh, sharded, mode
        if key not in self._configs:
            axes, schedule = (mesh.dp, mesh.tp, mesh.pp, mesh.cp, mesh.ep), self._config.parallel.schedule
            choice = LayoutChoice(*axes, 0, schedule, 1, 1, mesh.sequences, mode, sharded)
            self._configs[key] = in_layout(self._config, choice)
        return self._configs[key]

    def _pipeline(
        self,
        mesh: MeshSizes,
        options: Options,
        ranks: RankLayers,
        parts: Sequence[tuple[bool, str, Sizes]],
        micro_batches: Sizes,
        hardware: Hardware,
    ) -> tuple[Array, Array, Array]:
        """Return the seconds of all micro-batches by schedule, and of one through each row, forward and backward."""
        passes = np.concatenate([self._of_kinds(mesh, *part, hardware) for part in parts], axis=-1)
        forward, backward, weight = (ranks.counts @ part for part in passes)  # [rows, inner]
        total = forward + backward + weight
        slowest = np.maximum.reduceat(total, ranks.starts, axis=0)
        line = np.asarray(micro_batches * slowest, dtype=float)
        if mesh.pp > 1:
            everything, weights = self._layers @ passes.sum(axis=0), self._layers @ passes[2]
            each = (sizes * sent_bytes(self._in_layout(mesh, sharded), self._system) for sharded, _, sizes in parts)
            sent = np.concatenate(list(each))
            group = cost.axis_group(self._in_layout(mesh), "pp", hardware.gpus_per_node, self._system)
            send = cost.send_seconds(hardware, group, sent)
            by_name: dict[str, list[int]] = {}
            for number, settings in enumerate(options.schedule):
                by_name.setdefault(settings["parallel.schedule"], []).append(number)
            for name, rows in by_name.items():
                chunks = ranks.chunks[rows]
                seconds = everything, slowest[rows], weights
                line[rows] += cost.bubble_seconds(*seconds, name, chunks[:, None], micro_batches)
                for row, count in zip(rows, chunks, strict=True):
                    line[row] += cost.send_waits(mesh.pp, int(count), micro_batches, send, self._system.overlap_sends)
        return line, forward, backward + weight

    def _of_kinds(self, mesh: MeshSizes, sharded: bool, mode: str, sizes: Sizes, hardware: Hardware) -> Array:
        """Return the seconds of a layer of each kind, [forward, backward and weight; kinds; sizes]."""
        stride = mesh.pp if mesh.ep > 1 else min(mesh.pp, 2)  # with a pipeline, a GPU keeps fewer logits
        key = mesh.tp, mesh.cp, mesh.ep, stride, sharded, mode, hardware.gpus_per_node
        if key not in self._passes:
            self._passes[key] = self._computed(self._in_layout(mesh, sharded, mode), hardware)
        return self._passes[key][:, :, np.searchsorted(self._sizes, sizes)]

    def _computed(self, config: Config, hardware: Hardware) -> Array:
        """Compute the seconds of a layer of each kind for all micro-batch sizes, from a config with size 1."""
        sizes, per_node, system, model = self._sizes, hardware.gpus_per_node, self._system, config.model
        weights = model_weights(config)
        described, trains_head = weights.blocks, weights.trains_head[0]
        blocks = {
            kind: replace(layer_cost.cost_block(config, described[layer], per_node, system), samples=cast(int, sizes))
            for kind, layer in self._kinds.blocks
        }
        first = next(iter(blocks.values()))
        chunks = [config.train.loss_chunk_size] * len(sizes)
        if "train.loss_chunk_size" in self._config.derived:
            length, columns = -(-config.data.sequence_length // config.parallel.cp), -(-model.vocab_size // first.tp)
            device, pp = config.train.device, config.parallel.pp
            chunks = [logits_chunk(size * length, columns, device, pp) for size in sizes.tolist()]
        found = np.empty((3, self._kinds.count, len(sizes)))
        found[:, 0] = _totals(
            layer_cost.embedding_passes(first, hardware, weights.trains(weights.plan.layers[0])), sizes
        )
        for kind, block in blocks.items():
            found[:, kind] = _totals(layer_cost.block_passes(block, hardware, system, config.train.recompute), sizes)
        for chunked in (True, False):  # a head branches on this first
            some = np.array([(chunk > 0) == chunked for chunk in chunks], dtype=bool)
            if some.any():
                block, logits = replace(first, samples=sizes[some]), (model.vocab_size, int(chunked))
                head = layer_cost.head_passes(block, *logits, hardware, system, trains_head)
                last = replace(blocks[self._kinds.of_layer[-2]], samples=sizes[some])
                of_depths = model.mtp_layers, config.train.recompute, *logits
                head = head.plus(layer_cost.further_passes(last, *of_depths, hardware, system))
                found[:, self._kinds.head, some] = _totals(head, sizes[some])
        return found


def _totals(passes: layer_cost.Passes, sizes: Sizes) -> Array:
    return np.array([np.broadcast_to(part.total, sizes.shape) for part in passes])

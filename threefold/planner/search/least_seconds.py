"""Cost model of the search: exact estimates of one layout, and lower bounds of step times for many at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from threefold.config.resolve import is_derived, logits_chunk
from threefold.config.schema import Config
from threefold.config.section import divisors
from threefold.files import format_bytes
from threefold.models.block import describe_model
from threefold.planner.block_cost import Passes, axis_group, block_passes, cost_block, embedding_passes, head_passes
from threefold.planner.collective_cost import bubble_seconds, send_seconds, send_waits
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
from threefold.planner.search.bounds import Array, Evaluated, LayerKinds, LeastBytes, Mask, RankLayers, rank_layers
from threefold.planner.search.space import LayoutChoice, MeshSizes, Options, Settings, in_layout
from threefold.planner.systems import System, keeps_of

_TOLD: Final = 2
"""Number of causes that are named as limits of a layout."""


class ModelCosts:
    """Cost model of a resolved config on one rank, for a hardware and a training system."""

    def __init__(self, config: Config, hardware: Hardware, system: System) -> None:
        self._config, self._hardware, self._system = config, hardware, system
        description = describe_model(self._config.model, self._config.data.sequence_length)
        self._plan, self._kinds = description.plan, LayerKinds(description)
        self._ranks: dict[tuple[int, int], RankLayers] = {}
        keeps = keeps_of(self._system.name, self._hardware.device)
        self._seconds = LeastSeconds(self._config, self._hardware, self._system, self._kinds)
        self._bytes = LeastBytes(self._config, self._hardware.device, keeps, self._kinds)

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
        """Evaluate a layout exactly."""
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
        """Name what takes the most memory on the largest rank, with its size."""
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


Sizes = NDArray[np.int64]


@dataclass(frozen=True)
class _Inner:
    """Wanted options that the time of one micro-batch depends on, one after another.

    Attributes:
        places: indices of micro-batch size, sequence parallelism and recompute.
        parts: runs of equal sequence parallelism and recompute, each with its micro-batch sizes.
        micro_batches: micro-batches of a step.
    """

    places: tuple[Sizes, Sizes, Sizes]
    parts: list[tuple[bool, str, Sizes]]
    micro_batches: Sizes


class LeastSeconds:
    """Lower bounds of step times of one config on one type of hardware.

    Args:
        config: resolved config on one rank.
        hardware, system: device type and training system that compute it.
        kinds: kinds of the model's layers.
    """

    def __init__(self, config: Config, hardware: Hardware, system: System, kinds: LayerKinds) -> None:
        self._config, self._hardware, self._system, self._kinds = config, hardware, system, kinds
        self._passes: dict[object, Array] = {}
        self._sizes = np.array(divisors(config.train.global_batch_size))
        self._configs: dict[object, Config] = {}
        self._layers = np.bincount(kinds.of_layer, minlength=kinds.count)

    def __call__(self, mesh: MeshSizes, options: Options, ranks: RankLayers, elements: Array, wanted: Mask) -> Array:
        """Return the seconds of a step, infinite for options that are not wanted.

        Args:
            mesh: sizes of the mesh.
            options: options of the mesh.
            ranks: layers of the ranks under each schedule.
            elements: weight elements of each row of `ranks`.
            wanted: mask of the options asked for, in all dims.
        """
        inner = self._inner(mesh, options, wanted)
        found = np.full(options.shape, np.inf)
        hardware = self._hardware.shared_by(mesh.gpus)
        config, system = self._in_layout(mesh), self._system
        line, forward, backward = self._pipeline(mesh, options, ranks, inner, hardware)
        for number, settings in enumerate(options.zero):
            if not wanted[..., number].any():
                continue
            zero = settings["parallel.zero"]
            sums = gradient_time(
                config, hardware, system, zero, elements[:, None], forward, backward, inner.micro_batches
            )
            exposed = np.maximum.reduceat(np.broadcast_to(sums, forward.shape), ranks.starts, axis=0)
            update = update_time(config, hardware, system, zero, np.maximum.reduceat(elements, ranks.starts))
            seconds = line + exposed + np.asarray(update)[:, None] + hardware.achievable.step
            found[(*inner.places, slice(None), number)] = (seconds * (1 + waiting_share(mesh.gpus))).T
        return np.where(wanted, found, np.inf)

    def _inner(self, mesh: MeshSizes, options: Options, wanted: Mask) -> _Inner:
        asked: Mask = np.any(wanted, axis=(3, 4))
        sizes = np.array([each["train.micro_batch_size"] for each in options.micro_batch])
        places: list[tuple[Sizes, Sizes, Sizes]] = []
        parts = []
        for sequence, recompute in np.argwhere(asked.any(axis=0)):
            micro = np.flatnonzero(asked[:, sequence, recompute])
            places.append((micro, np.full_like(micro, sequence), np.full_like(micro, recompute)))
            sharded = options.sequence_parallel[sequence]["parallel.sequence_parallel"]
            mode = options.recompute[recompute]["train.recompute"]
            parts.append((sharded, mode, sizes[micro]))
        micro, sequences, recomputes = (np.concatenate(each) for each in zip(*places, strict=True))
        return _Inner((micro, sequences, recomputes), parts, mesh.share // sizes[micro])

    def _in_layout(self, mesh: MeshSizes, sharded: bool = False, mode: str = "none") -> Config:
        """Return the config in a mesh, with micro-batches of one sample."""
        key = mesh, sharded, mode
        if key not in self._configs:
            axes = mesh.dp, mesh.tp, mesh.pp, mesh.cp, mesh.ep
            schedule = self._config.parallel.schedule
            choice = LayoutChoice(*axes, 0, schedule, 1, 1, mesh.share, mode, sharded)
            self._configs[key] = in_layout(self._config, choice)
        return self._configs[key]

    def _pipeline(
        self, mesh: MeshSizes, options: Options, ranks: RankLayers, inner: _Inner, hardware: Hardware
    ) -> tuple[Array, Array, Array]:
        """Return the seconds of all micro-batches by schedule, and of one through each row, forward and backward."""
        passes = np.concatenate([self._of_kinds(mesh, *part, hardware) for part in inner.parts], axis=-1)
        forward, backward, weight = (ranks.counts @ part for part in passes)  # [rows, inner]
        total = forward + backward + weight
        slowest = np.maximum.reduceat(total, ranks.starts, axis=0)
        line = np.asarray(inner.micro_batches * slowest, dtype=float)
        if mesh.pp > 1:
            everything, weights = self._layers @ passes.sum(axis=0), self._layers @ passes[2]
            is_slowest = total == slowest[ranks.schedule]
            of_slowest = np.minimum.reduceat(np.where(is_slowest, weight, np.inf), ranks.starts, axis=0)
            of_one = {
                sharded: sent_bytes(self._in_layout(mesh, sharded), self._system) for sharded, _, _ in inner.parts
            }
            sent = np.concatenate([sizes * of_one[sharded] for sharded, _, sizes in inner.parts])
            group = axis_group(self._in_layout(mesh), "pp", hardware.gpus_per_node, self._system)
            send = send_seconds(hardware, group, sent)  # type: ignore[arg-type]
            for rows, name, chunks in _alike(options):
                line[rows] += bubble_seconds(
                    everything,
                    slowest[rows],  # type: ignore[arg-type]
                    weights,
                    of_slowest[rows],  # type: ignore[arg-type]
                    name,
                    chunks[:, None],  # type: ignore[arg-type]
                    inner.micro_batches,  # type: ignore[arg-type]
                )
                for row, count in zip(rows, chunks, strict=True):
                    line[row] += send_waits(mesh.pp, int(count), inner.micro_batches, send, self._system.overlap_sends)  # type: ignore[arg-type]
        return line, forward, backward + weight

    def _of_kinds(self, mesh: MeshSizes, sharded: bool, mode: str, sizes: Sizes, hardware: Hardware) -> Array:
        """Return the seconds of a layer of each kind, [forward, backward and weight; kinds; sizes]."""
        stride = mesh.pp if mesh.ep > 1 else 1
        key = mesh.tp, mesh.cp, mesh.ep, stride, sharded, mode, hardware.gpus_per_node
        if key not in self._passes:
            self._passes[key] = self._computed(self._in_layout(mesh, sharded, mode), hardware)
        return self._passes[key][:, :, np.searchsorted(self._sizes, sizes)]

    def _computed(self, config: Config, hardware: Hardware) -> Array:
        """Compute the seconds of a layer of each kind for all micro-batch sizes, from a config with size 1."""
        sizes, per_node, system = self._sizes, hardware.gpus_per_node, self._system
        described = describe_model(config.model, config.data.sequence_length).blocks
        blocks = {
            kind: replace(cost_block(config, described[layer], per_node, system), samples=sizes)  # type: ignore[arg-type]
            for kind, layer in self._kinds.blocks
        }
        first = next(iter(blocks.values()))
        chunks = [self._chunk(config, size) for size in sizes.tolist()]
        found = np.empty((3, self._kinds.count, len(sizes)))
        found[:, 0] = _totals(embedding_passes(first, hardware), sizes)
        for kind, block in blocks.items():
            found[:, kind] = _totals(block_passes(block, hardware, system, config.train.recompute), sizes)
        for chunked in (True, False):  # a head branches on this first
            some = np.array([(chunk > 0) == chunked for chunk in chunks], dtype=bool)
            if some.any():
                head = head_passes(
                    replace(first, samples=sizes[some]), config.model.vocab_size, int(chunked), hardware, system
                )
                found[:, self._kinds.head, some] = _totals(head, sizes[some])
        return found

    def _chunk(self, config: Config, size: int) -> int:
        if not is_derived(self._config, "train.loss_chunk_size"):
            return config.train.loss_chunk_size
        tokens = size * -(-config.data.sequence_length // config.parallel.cp)
        return logits_chunk(tokens, -(-config.model.vocab_size // config.parallel.tp))


def _totals(passes: Passes, sizes: Sizes) -> Array:
    return np.array([np.broadcast_to(part.total, sizes.shape) for part in passes])


def _alike(options: Options) -> list[tuple[list[int], str, Array]]:
    """Group the schedules by name: their indices, the name, and the stages per rank of each."""
    rows: dict[str, list[int]] = {}
    for number, settings in enumerate(options.schedule):
        rows.setdefault(settings["parallel.schedule"], []).append(number)
    return [
        (numbers, name, np.array([float(options.schedule[number]["parallel.stage_chunks"]) for number in numbers]))
        for name, numbers in rows.items()
    ]

"""Estimated seconds of matrix products, memory-bound work, collectives, pipelines and optimizer updates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Any, Final, NamedTuple, TypeVar

from threefold.planner.hardware import Hardware
from threefold.planner.systems import System

_TILES: Final = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.97), (128, 64, 0.85), (64, 64, 0.7))
"""Output tiles of one multiprocessor as (rows, columns, relative speed); small tiles read their inputs more often
(NVIDIA, "Matrix multiplication background user's guide", tile quantization)."""
Number = TypeVar("Number", int, float)


def positive(value: float) -> float:
    """Return the value, or 0 where it is negative; elementwise for arrays."""
    return (value + abs(value)) / 2


def larger(one: Number, other: Number) -> Number:
    """Return the larger of two values; elementwise for arrays."""
    is_more = one > other
    if isinstance(is_more, bool):
        return one if is_more else other
    import numpy as np  # only arrays come here, so numpy is loaded already

    chosen: Any = np.where(is_more, one, other)
    return chosen


def matrix_seconds(
    hardware: Hardware, dtype: str, rows: float, columns: int, depth: int, count: int = 1, itemsize: int = 2
) -> float:
    """Estimate `count` products (such as heads or experts) of (rows × depth) and (depth × columns) in one kernel."""
    reached = hardware.achievable
    flops = 2 * count * rows * columns * depth
    filled = _filled(hardware.multiprocessors, rows, columns, count)
    fraction = reached.matrix * depth / (depth + reached.matrix_depth) * filled
    moved = itemsize * count * (rows * depth + depth * columns + rows * columns)
    computing = flops / (hardware.matrix_rate(dtype) * fraction)
    moving = moved / (hardware.memory_bandwidth * reached.memory)
    if hardware.device == "cpu":  # the CPU's rate holds for matrices in cache, and they must be loaded first
        return computing + moving + reached.kernel
    return larger(computing, moving) + reached.kernel


def _filled(multiprocessors: int, rows: float, columns: int, count: int) -> float:
    """Return the share of the multiprocessors' time spent on output rather than on partial tiles and waves."""
    if multiprocessors == 1:
        return 1.0
    best = 0.0
    for tile_rows, tile_columns, speed in _TILES:
        tiles = count * -(-rows // tile_rows) * -(-columns // tile_columns)
        waves = -(-tiles // multiprocessors)
        used = count * rows * columns / (waves * multiprocessors * tile_rows * tile_columns)
        best = larger(best, used * speed)
    return best


def memory_seconds(hardware: Hardware, nbytes: float, kernels: float = 1) -> float:
    """Estimate reading and writing `nbytes` in some kernels."""
    return nbytes / (hardware.memory_bandwidth * hardware.achievable.memory) + kernels * hardware.achievable.kernel


def attention_seconds(
    hardware: Hardware, dtype: str, flops: float, length: float, head_dim: int, backward: bool = False
) -> float:
    """Estimate fused attention: `flops` without the masked part, for queries that attend to `length` positions at
    most."""
    reached = hardware.achievable
    share = reached.attention_backward if backward else reached.attention
    fraction = share * head_dim / (head_dim + reached.attention_depth) * length / (length + reached.attention_length)
    return flops / (hardware.matrix_rate(dtype) * fraction) + reached.kernel


_WIRE = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True)
class Group:
    """Ranks of a mesh axis, `stride` global ranks apart, on nodes of `per_node` ranks."""

    ranks: int
    stride: int
    per_node: int

    @property
    def in_node(self) -> int:
        """Number of the group's ranks on one node."""
        return max(1, min(self.ranks, self.per_node // self.stride))

    @property
    def nodes(self) -> int:
        return ceil(self.ranks / self.in_node)


def ring_seconds(hardware: Hardware, group: Group, operation: str, nbytes: float) -> float:
    """Estimate one ring collective (`all_reduce`, `all_gather` or `reduce_scatter`) of a whole tensor of `nbytes`."""
    if group.ranks == 1:
        return 0.0
    rounds = _WIRE[operation]
    moved = rounds * nbytes * (group.ranks - 1) / group.ranks
    passes = 2 if hardware.device == "cpu" else rounds  # shared memory has one latency for all collectives
    return moved / bandwidth(hardware, group) + passes * latency(hardware, group)


def bandwidth(hardware: Hardware, group: Group) -> float:
    """Return the bytes per second of one device in a ring over the group."""
    inside = hardware.inside.bandwidth * hardware.achievable.link
    if group.nodes == 1:
        return inside
    return min(inside, group.in_node * hardware.between.bandwidth * hardware.achievable.network)


def latency(hardware: Hardware, group: Group) -> float:
    """Return the latency of one pass through the group: logarithmic (trees), or constant between ranks of a CPU."""
    if hardware.device == "cpu":
        return hardware.inside.latency
    inside = hardware.inside.latency * log2(group.in_node) if group.in_node > 1 else 0.0
    return inside + (hardware.between.latency * log2(group.nodes) if group.nodes > 1 else 0.0)


def all_to_all_seconds(hardware: Hardware, group: Group, nbytes: float) -> float:
    """Estimate an all-to-all in which each rank sends `nbytes`, its own part included."""
    if group.ranks == 1:
        return 0.0
    inside = nbytes * (group.in_node - 1) / group.ranks
    outside = nbytes * (group.ranks - group.in_node) / group.ranks
    over_link = inside / (hardware.inside.bandwidth * hardware.achievable.link)
    over_network = outside / (hardware.between.bandwidth * hardware.achievable.network)
    return larger(over_link, over_network) + latency(hardware, group)


def send_seconds(hardware: Hardware, group: Group, nbytes: float) -> float:
    """Estimate sending `nbytes` to the next rank of the group, over its slowest link."""
    if group.ranks == 1:
        return 0.0
    link, reached = hardware.inside, hardware.achievable.link
    if group.nodes > 1:
        link, reached = hardware.between, hardware.achievable.network
    return link.latency + nbytes / (link.bandwidth * reached)


_PIECES = 12
"""Pieces in which gradients are reduced during the backward pass; the last is exposed."""
_CONTENTION = 0.25
"""Slowdown of computation by a concurrent collective, as a share of its time: both need compute units and memory."""
ZERO_STATE, ZERO_GRADIENTS, ZERO_WEIGHTS = 1, 2, 3
"""Values of `parallel.zero`, named after the part that each shards in addition to the smaller values."""


def gradient_seconds(
    hardware: Hardware,
    system: System,
    group: Group,
    elements: float,
    forward: float,
    backward: float,
    micro_batches: int = 1,
    zero: int = 0,
    itemsize: int = 2,
    gradient_bytes: int = 4,
    layers: int = 1,
) -> float:
    """Estimate the exposed seconds of a step's gradient reduction and, with sharded state, of its gathers of weights.

    The ranks of the group hold the same `elements`, whose passes take `forward` and `backward` seconds per micro-batch.
    A compute weight has `itemsize` bytes and a reduced gradient `gradient_bytes`; with `zero` 3, layers are gathered
    one by one.
    """
    if group.ranks == 1:
        return 0.0
    summed = system.gradient_bytes or gradient_bytes
    scatters = micro_batches if zero == ZERO_GRADIENTS else 1
    if zero and hardware.device == "cpu":
        # A CPU's cores also communicate, so that nothing overlaps, and `fully_shard` copies what it gathers and
        # reduce-scatters. The latency is part of `sharded_block`.
        link = replace(hardware.inside, latency=0.0)
        hardware = replace(hardware, inside=link, between=link)
        gather = ring_seconds(hardware, group, "all_gather", elements * itemsize)
        gather += memory_seconds(hardware, 2 * elements * itemsize, 0)
        scatter = ring_seconds(hardware, group, "reduce_scatter", elements * summed)
        scatter += memory_seconds(hardware, 2 * elements * summed, 0)
        blocks = layers * hardware.achievable.sharded_block
        if zero == ZERO_WEIGHTS:
            return micro_batches * (blocks + 2 * gather + scatter)
        return blocks + gather + scatters * scatter
    pieces = layers if zero == ZERO_WEIGHTS else 1
    gather = pieces * ring_seconds(hardware, group, "all_gather", elements / pieces * itemsize)
    scatter = pieces * ring_seconds(hardware, group, "reduce_scatter", elements / pieces * summed)
    if zero == ZERO_WEIGHTS:
        parts = exposed_part(gather, forward, layers), exposed_part(gather + scatter, backward, layers)
        exposed, whole = micro_batches * sum(parts), micro_batches * (2 * gather + scatter)
    else:
        whole = scatter * scatters + gather
        if not system.overlap_gradients:
            return whole
        exposed = scatters * exposed_part(scatter, backward, _PIECES) + exposed_part(gather, forward, _PIECES)
    return exposed + _CONTENTION * (whole - exposed)


def exposed_part(collective: float, beside: float, pieces: int) -> float:
    """Return the exposed part of a collective that runs in pieces during a computation: one piece and any excess."""
    return collective / pieces + positive(collective * (1 - 1 / pieces) - beside)


def update_seconds(
    hardware: Hardware, elements: float, states: int = 2, itemsize: int = 2, master: bool = True
) -> float:
    """Estimate the gradient norm and the optimizer update, which reads and writes weights, gradients and state.

    The optimizer keeps `states` tensors per weight; these, the weights and the gradients are fp32 if `master`.
    """
    wide = 4 if master else itemsize
    nbytes = wide * (2 + 2 * states + 1) + (itemsize if itemsize < wide else 0)  # weight and states read and written
    norm_and_zero = 3 * wide
    return memory_seconds(hardware, elements * (nbytes + norm_and_zero), 50)


_DEFERRING: Final = ("zero-bubble", "zbv", "dualpipev")
"""Schedules that compute weight gradients in the bubble."""


class Pipeline(NamedTuple):
    """Seconds of a step in a pipeline: computing on the busiest rank, its idle time without sends, and exposed
    sends."""

    busy: float
    bubble: float
    sends: float

    @property
    def total(self) -> float:
        return self.busy + self.bubble + self.sends


def pipeline_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    schedule: str,
    chunks: int,
    micro_batches: int,
    send: float = 0.0,
    overlapped: bool = False,
) -> Pipeline:
    """Estimate a step's forward and backward passes through the pipeline.

    Each rank's seconds are those of one micro-batch's passes through all its stages, backward for input gradients and
    for weight gradients. A schedule from a file counts as `1f1b`. `send` is the time to send a stage's output to the
    next rank; sends overlap with computation once the pipeline is full if `overlapped`.
    """
    ranks = len(forward)
    totals = [sum(parts) for parts in zip(forward, backward, weight, strict=True)]
    slowest = max(range(ranks), key=totals.__getitem__)
    busy = micro_batches * totals[slowest]
    if ranks == 1:
        return Pipeline(busy, 0.0, 0.0)
    others = bubble_seconds(sum(totals), totals[slowest], sum(weight), weight[slowest], schedule, chunks, micro_batches)
    return Pipeline(busy, others, send_waits(ranks, chunks, micro_batches, send, overlapped))


def bubble_seconds(
    everything: float, slowest: float, weights: float, of_slowest: float, schedule: str, chunks: int, micro_batches: int
) -> float:
    """Return the slowest rank's idle time while the others fill and drain the pipeline. With fewer micro-batches than
    ranks it also waits for the next stage's turn, as a micro-batch passes the stages one after another.

    `everything` are the seconds of one micro-batch through all ranks, and `weights` and `of_slowest` the
    weight-gradient parts of it and of the slowest rank's.
    """
    waits, through = (everything - slowest) / chunks, everything
    if schedule in _DEFERRING:  # leaves (p - 1)(F + B - W) of (p - 1)(F + B + W)
        waits = positive(waits - 2 * (weights - of_slowest) / chunks)
        through = everything - weights
    through = through + (micro_batches - 1) * slowest / chunks
    return waits + positive(through - micro_batches * slowest - waits)


def send_waits(ranks: int, chunks: int, micro_batches: int, send: float, overlapped: bool) -> float:
    """Return the seconds of transfers that no computation hides; see `pipeline_seconds`."""
    hops = 2 * (ranks - 1)  # to the last rank and back
    steady = 0.0 if overlapped and chunks > 1 else 2 * chunks * micro_batches * send
    return hops * send + steady

"""Estimated seconds of products, collectives, pipelines and optimizer updates, from their sizes on a rank."""

from collections.abc import Sequence
from dataclasses import replace
from math import log2
from typing import Any, Final, NamedTuple

from threefold.config import Config
from threefold.config.schedules import SCHEDULES
from threefold.planner.hardware import Hardware
from threefold.planner.model_size import ZERO_GRADIENTS, ZERO_WEIGHTS
from threefold.planner.rank_block import Group
from threefold.planner.schedule import step_length
from threefold.planner.systems import System

_TILES: Final = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.97), (128, 64, 0.85), (64, 64, 0.7))
"""Output tiles of one multiprocessor as (rows, columns, relative speed); small tiles read their inputs more often
(NVIDIA, "Matrix multiplication background user's guide", tile quantization)."""
Number = Any
"""Number, or an array of numbers of many layouts."""


def positive(value: float) -> float:
    """Return the value, or 0 where it is negative; elementwise for arrays."""
    return (value + abs(value)) / 2


def larger(one: Number, other: Number) -> Number:
    """Return the larger of two values; elementwise for arrays."""
    is_more = one > other
    if isinstance(is_more, bool):
        return one if is_more else other
    import numpy as np  # only arrays come here, so numpy is loaded already

    return np.where(is_more, one, other)


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
    """Return the fraction of the multiprocessors' time spent on output rather than on partial tiles and waves."""
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
    best = reached.attention_backward if backward else reached.attention
    fraction = best * head_dim / (head_dim + reached.attention_depth) * length / (length + reached.attention_length)
    return flops / (hardware.matrix_rate(dtype) * fraction) + reached.kernel


_WIRE = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


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


def send_seconds(hardware: Hardware, group: Group, nbytes: Number) -> Number:
    """Estimate sending `nbytes` to the next rank of the group, over its slowest link."""
    if group.ranks == 1:
        return 0.0
    link, reached = hardware.inside, hardware.achievable.link
    if group.nodes > 1:
        link, reached = hardware.between, hardware.achievable.network
    return link.latency + nbytes / (link.bandwidth * reached)


_GRADIENT_PIECES = 12
"""Pieces in which gradients are reduced during the backward pass; the last is exposed."""
_CONTENTION = 0.25
"""Slowdown of computation by a concurrent collective, over the time of that: both need compute units and memory."""


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
    chunks = layers if zero == ZERO_WEIGHTS else 1
    gather = chunks * ring_seconds(hardware, group, "all_gather", elements / chunks * itemsize)
    scatter = chunks * ring_seconds(hardware, group, "reduce_scatter", elements / chunks * summed)
    if zero == ZERO_WEIGHTS:
        parts = exposed_part(gather, forward, layers), exposed_part(gather + scatter, backward, layers)
        exposed, whole = micro_batches * sum(parts), micro_batches * (2 * gather + scatter)
    else:
        whole = scatter * scatters + gather
        if not system.overlap_gradients:
            return whole
        exposed = scatters * exposed_part(scatter, backward, _GRADIENT_PIECES)
        exposed += exposed_part(gather, forward, _GRADIENT_PIECES)
    return exposed + _CONTENTION * (whole - exposed)


def exposed_part(collective: float, beside: float, chunks: int) -> float:
    """Return the exposed part of a collective that runs in chunks during a computation: one chunk and any excess."""
    return collective / chunks + positive(collective * (1 - 1 / chunks) - beside)


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
    next rank; sends overlap with computation once the pipeline is full if `overlapped`. The idle time of a schedule
    that defers weight gradients is simulated, as its order decides how many of them fill it.
    """
    ranks = len(forward)
    totals = [sum(parts) for parts in zip(forward, backward, weight, strict=True)]
    slowest = max(range(ranks), key=totals.__getitem__)
    busy = micro_batches * totals[slowest]
    if ranks == 1:
        return Pipeline(busy, 0.0, 0.0)
    if _is_simulated(schedule):
        others = step_length(SCHEDULES[schedule], forward, backward, weight, chunks, micro_batches) - busy
    else:
        others = bubble_seconds(sum(totals), totals[slowest], sum(weight), schedule, chunks, micro_batches)
    return Pipeline(busy, others, send_waits(ranks, chunks, micro_batches, send, overlapped))


def _is_simulated(schedule: str) -> bool:
    return schedule in SCHEDULES and SCHEDULES[schedule].defers_weight_gradients


def bubble_seconds(
    everything: Number,
    slowest: Number,
    weights: Number,
    schedule: str,
    chunks: Number,
    micro_batches: Number,
) -> Number:
    """Return the slowest rank's idle time while the others fill and drain the pipeline. With fewer micro-batches than
    ranks it also waits for the next stage's turn, as a micro-batch passes the stages one after another.

    For schedules that defer weight gradients this is a lower bound: the slowest rank may wait for nothing while the
    others have less to do, but the first micro-batch passes all stages in any case.

    `everything` are the seconds of one micro-batch through all ranks, and `weights` the weight-gradient part of it.
    """
    if _is_simulated(schedule):
        return positive(everything - weights - micro_batches * slowest)
    waits = (everything - slowest) / chunks
    through = everything + (micro_batches - 1) * slowest / chunks
    return waits + positive(through - micro_batches * slowest - waits)


def send_waits(ranks: int, chunks: int, micro_batches: Number, send: Number, overlapped: bool) -> Number:
    """Return the seconds of transfers that no computation hides; see `pipeline_seconds`."""
    hops = 2 * (ranks - 1)  # to the last rank and back
    steady = 0.0 if overlapped and chunks > 1 else 2 * chunks * micro_batches * send
    return hops * send + steady


def axis_group(config: Config, axis: str, per_node: int, system: System) -> Group:
    """Return the group of the axis `pp`, `ep` or `dp·cp`: its ranks, and their stride in the rank order dp × pp × cp ×
    tp, of which a training system may swap dp and pp."""
    parallel = config.parallel
    inner = parallel.tp * parallel.cp
    data, stages = (inner, inner * parallel.dp) if system.data_inside_pipeline else (inner * parallel.pp, inner)
    ranks, stride = {
        "pp": (parallel.pp, stages),
        "ep": (parallel.ep, data),
        "dp·cp": (parallel.dp * parallel.cp, data if parallel.cp == 1 else min(data, parallel.tp)),
    }[axis]
    return Group(ranks, stride, per_node)

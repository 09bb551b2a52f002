"""What a training step takes: seconds of matrix products, memory-bound work, collectives, pipeline and optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Any, Final, NamedTuple, TypeVar

from threefold.planner.hardware import Hardware
from threefold.planner.systems import System

_TILES: Final = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.97), (128, 64, 0.85), (64, 64, 0.7))
"""Rows and columns of the output that a multiprocessor computes at once, and how fast with them, for what a small tile
reads again (NVIDIA, "Matrix multiplication background user's guide", tile quantization)."""
PER_MULTIPLY_ADD: Final = 2
Number = TypeVar("Number", int, float)


def positive(value: float) -> float:
    """The value, or 0 where it is below; of each element of an array."""
    return (value + abs(value)) / 2


def larger(one: Number, other: Number) -> Number:
    """The larger of two values; of each pair of elements of arrays."""
    is_more = one > other
    if isinstance(is_more, bool):
        return one if is_more else other
    import numpy as np  # there are arrays, so that it is imported

    chosen: Any = np.where(is_more, one, other)
    return chosen


def matrix_seconds(
    hardware: Hardware, dtype: str, rows: float, columns: int, depth: int, count: int = 1, itemsize: int = 2
) -> float:
    """Of `count` products of (rows × depth) and (depth × columns) in one kernel.

    Args:
        hardware: that computes it.
        dtype: of the rate.
        rows, columns, depth: of each product.
        count: products at once, such as heads or experts.
        itemsize: bytes of an element.
    """
    reached = hardware.achievable
    flops = PER_MULTIPLY_ADD * count * rows * columns * depth
    fraction = (
        reached.matrix
        * depth
        / (depth + reached.matrix_depth)
        * _filled(hardware.multiprocessors, rows, columns, count)
    )
    moved = itemsize * count * (rows * depth + depth * columns + rows * columns)
    computing = flops / (hardware.matrix_rate(dtype) * fraction)
    moving = moved / (hardware.memory_bandwidth * reached.memory)
    if hardware.device == "cpu":  # whose rate is that of matrices in its caches, into which others have to come first
        return computing + moving + reached.kernel
    return larger(computing, moving) + reached.kernel


def _filled(multiprocessors: int, rows: float, columns: int, count: int) -> float:
    """Share of the multiprocessors' time that goes into the output: the rest, into tiles over its edges and a last wave
    that does not fill them."""
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
    """Of reading and writing so many bytes in so many kernels."""
    return nbytes / (hardware.memory_bandwidth * hardware.achievable.memory) + kernels * hardware.achievable.kernel


def attention_seconds(
    hardware: Hardware, dtype: str, flops: float, length: float, head_dim: int, backward: bool = False
) -> float:
    """Of one kernel of fused attention.

    Args:
        hardware, dtype: that compute it.
        flops: without the masked part.
        length: positions that a query sees at most.
        head_dim: width of a head.
        backward: which pass.
    """
    reached = hardware.achievable
    share = reached.attention_backward if backward else reached.attention
    fraction = share * head_dim / (head_dim + reached.attention_depth) * length / (length + reached.attention_length)
    return flops / (hardware.matrix_rate(dtype) * fraction) + reached.kernel


_WIRE = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@dataclass(frozen=True)
class Group:
    """Ranks of an axis, at equal distances.

    Attributes:
        ranks: how many.
        stride: from one to the next, in ranks of the world.
        per_node: ranks of a node.
    """

    ranks: int
    stride: int
    per_node: int

    @property
    def in_node(self) -> int:
        """Of its ranks, those of one node."""
        return max(1, min(self.ranks, self.per_node // self.stride))

    @property
    def nodes(self) -> int:
        """How many nodes it spans."""
        return ceil(self.ranks / self.in_node)


def ring_seconds(hardware: Hardware, group: Group, operation: str, nbytes: float) -> float:
    """Of one collective.

    Args:
        hardware: of the ranks.
        group: that take part.
        operation: `all_reduce`, `all_gather` or `reduce_scatter`.
        nbytes: of the whole tensor.
    """
    if group.ranks == 1:
        return 0.0
    rounds = _WIRE[operation]
    moved = rounds * nbytes * (group.ranks - 1) / group.ranks
    passes = (
        2 if hardware.device == "cpu" else rounds
    )  # ranks that share memory wait once for each other, whatever they do
    return moved / bandwidth(hardware, group) + passes * latency(hardware, group)


def bandwidth(hardware: Hardware, group: Group) -> float:
    """Bytes per second of a device in a ring of the group."""
    inside = hardware.inside.bandwidth * hardware.achievable.link
    if group.nodes == 1:
        return inside
    return min(inside, group.in_node * hardware.between.bandwidth * hardware.achievable.network)


def latency(hardware: Hardware, group: Group) -> float:
    """Of one pass through the group: trees have logarithmic depth. Ranks of a CPU all wait for the last of them."""
    if hardware.device == "cpu":
        return hardware.inside.latency
    inside = hardware.inside.latency * log2(group.in_node) if group.in_node > 1 else 0.0
    return inside + (hardware.between.latency * log2(group.nodes) if group.nodes > 1 else 0.0)


def all_to_all_seconds(hardware: Hardware, group: Group, nbytes: float) -> float:
    """Of an all-to-all in which each rank sends so many bytes, its own part among them."""
    if group.ranks == 1:
        return 0.0
    inside = nbytes * (group.in_node - 1) / group.ranks
    outside = nbytes * (group.ranks - group.in_node) / group.ranks
    reached = hardware.achievable
    return larger(
        inside / (hardware.inside.bandwidth * reached.link), outside / (hardware.between.bandwidth * reached.network)
    ) + latency(hardware, group)


def send_seconds(hardware: Hardware, group: Group, nbytes: float) -> float:
    """Of sending to the next rank of the group, the slowest of its links."""
    if group.ranks == 1:
        return 0.0
    link, reached = (
        (hardware.inside, hardware.achievable.link)
        if group.nodes == 1
        else (hardware.between, hardware.achievable.network)
    )
    return link.latency + nbytes / (link.bandwidth * reached)


_PIECES = 12
"""Parts in which gradients are summed while the backward pass makes them: the last is exposed."""
_CONTENTION = 0.25
"""Share of a collective's time by which a computation beside it takes longer: both need multiprocessors and memory."""
_SHARDED_WEIGHTS = 3  # values of parallel.zero
_STATE_AND_GRADIENTS = 2


class Sums(NamedTuple):
    """Data-parallel collectives of a step.

    Attributes:
        exposed: seconds that no computation hides.
        hidden: seconds beside computation.
    """

    exposed: float
    hidden: float


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
) -> Sums:
    """Of the sums of gradients and, with sharded state or weights, the gathers of weights.

    Args:
        hardware, system: that do it.
        group: of the ranks that hold the same weights.
        elements: of the weights of one of them.
        forward, backward: seconds of one micro-batch's passes through them.
        micro_batches: of a step.
        zero: as `parallel.zero`.
        itemsize: bytes of an element of a computed weight.
        gradient_bytes: of an element of a gradient in the sum.
        layers: that are gathered one by one with `zero` 3.
    """
    if group.ranks == 1:
        return Sums(0.0, 0.0)
    summed = system.gradient_bytes or gradient_bytes
    if zero and hardware.device == "cpu":
        return _on_cpu(hardware, group, elements, itemsize, summed, micro_batches, zero, layers)
    pieces = layers if zero == _SHARDED_WEIGHTS else 1
    gather = pieces * ring_seconds(hardware, group, "all_gather", elements / pieces * itemsize)
    scatter = pieces * ring_seconds(hardware, group, "reduce_scatter", elements / pieces * summed)
    if zero == _SHARDED_WEIGHTS:
        first = _exposed(gather, forward, layers), _exposed(gather + scatter, backward, layers)
        return _shared(micro_batches * sum(first), micro_batches * (2 * gather + scatter))
    scatters = micro_batches if zero == _STATE_AND_GRADIENTS else 1
    whole = scatter * scatters + gather
    if not system.overlap_gradients:
        return Sums(whole, 0.0)
    exposed = scatters * _exposed(scatter, backward, _PIECES) + _exposed(gather, forward, _PIECES)
    return _shared(exposed, whole)


def _on_cpu(
    hardware: Hardware,
    group: Group,
    elements: float,
    itemsize: int,
    summed: int,
    micro_batches: int,
    zero: int,
    layers: int,
) -> Sums:
    """With sharded state or weights on cores that communicate too, so that nothing overlaps. `fully_shard` copies
    what it gathers, and what it reduces and scatters."""
    link = replace(hardware.inside, latency=0.0)  # which is part of what a block takes longer
    hardware = replace(hardware, inside=link, between=link)
    gather = ring_seconds(hardware, group, "all_gather", elements * itemsize)
    gather += memory_seconds(hardware, 2 * elements * itemsize, 0)
    scatter = ring_seconds(hardware, group, "reduce_scatter", elements * summed)
    scatter += memory_seconds(hardware, 2 * elements * summed, 0)
    blocks = layers * hardware.achievable.sharded_block
    if zero == _SHARDED_WEIGHTS:
        return Sums(micro_batches * (blocks + 2 * gather + scatter), 0.0)
    return Sums(blocks + gather + (micro_batches if zero == _STATE_AND_GRADIENTS else 1) * scatter, 0.0)


def _shared(exposed: float, whole: float) -> Sums:
    slowed = _CONTENTION * (whole - exposed)
    return Sums(exposed + slowed, whole - exposed - slowed)


def _exposed(collective: float, beside: float, pieces: int) -> float:
    """Of a collective in pieces beside a computation, one piece, and what takes longer than the computation."""
    return collective / pieces + positive(collective * (1 - 1 / pieces) - beside)


def update_seconds(
    hardware: Hardware, elements: float, states: int = 2, itemsize: int = 2, master: bool = True
) -> float:
    """Of the optimizer's update, which reads and writes weights, gradients and state, and of the gradients' norm.

    Args:
        hardware: that does it.
        elements: that the rank updates.
        states: tensors of the optimizer for each weight.
        itemsize: bytes of a computed weight.
        master: whether weights, gradients and state are fp32.
    """
    wide = 4 if master else itemsize
    nbytes = wide * (2 + 2 * states + 1) + (itemsize if itemsize < wide else 0)  # weight and states read and written
    norm_and_zero = 3 * wide
    return memory_seconds(hardware, elements * (nbytes + norm_and_zero), 50)


_DEFERRING: Final = ("zero-bubble", "zbv", "dualpipev")
"""Schedules that compute the gradients of weights in the bubble."""


class Pipeline(NamedTuple):
    """Seconds of all micro-batches of a step.

    Attributes:
        busy: of the rank with the most to compute.
        bubble: in which it waits, sends aside.
        sends: transfers that no computation hides.
    """

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
    """The time of a step's forward and backward passes.

    Args:
        forward: seconds of a micro-batch's forward pass through all stages of each rank.
        backward, weight: the same, of the backward pass for gradients of inputs and of weights.
        schedule: as in `parallel.schedule`; one of a file counts as `1f1b`.
        chunks: stages of each rank.
        micro_batches: of a step.
        send: seconds that a stage's output takes to the next rank.
        overlapped: whether sends run beside computing once the pipeline is full.
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
    everything: float,
    slowest: float,
    weights: float,
    of_slowest: float,
    schedule: str,
    chunks: int,
    micro_batches: int,
) -> float:
    """In which the slowest rank waits while the others fill and drain; or, with fewer micro-batches than ranks, for the
    next stage's turn, as a micro-batch goes through all stages one after the other.

    Args:
        everything: seconds of a micro-batch through all ranks.
        slowest: of it, those of the slowest rank.
        weights, of_slowest: of both, those of gradients of weights.
        schedule, chunks, micro_batches: as of `pipeline_seconds`.
    """
    waits, through = (everything - slowest) / chunks, everything
    if schedule in _DEFERRING:  # (p - 1)(F + B - W) of (p - 1)(F + B + W) is left
        waits = positive(waits - 2 * (weights - of_slowest) / chunks)
        through = everything - weights
    through = through + (micro_batches - 1) * slowest / chunks
    return waits + positive(through - micro_batches * slowest - waits)


def send_waits(ranks: int, chunks: int, micro_batches: int, send: float, overlapped: bool) -> float:
    """Transfers that no computation hides; arguments as of `pipeline_seconds`."""
    hops = 2 * (ranks - 1)  # to the last rank and back
    steady = 0.0 if overlapped and chunks > 1 else 2 * chunks * micro_batches * send
    return hops * send + steady

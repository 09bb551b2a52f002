"""Seconds of what a step does once: sums of gradients over the replicas, gathers of weights, and the update."""

from dataclasses import replace
from typing import NamedTuple

from threefold.plan.cost.collectives import Group, ring_seconds
from threefold.plan.cost.kernels import memory_seconds, positive
from threefold.plan.cost.system import System
from threefold.plan.hardware.entry import Hardware

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

"""Seconds of single kernels: matrix products, attention, and passes over memory.

A roofline: what a kernel multiplies at an achievable share of the peak, or what it moves at an achievable share of the
bandwidth, whichever takes longer (Williams et al., "Roofline", CACM 2009), and the time between two kernels.
"""

from typing import Any, Final, TypeVar

from threefold.plan.hardware.entry import Hardware

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

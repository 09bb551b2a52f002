"""Seconds of what is before and after the blocks: the embedding, and the head with its loss."""

from functools import lru_cache

from threefold.plan.cost.block import Passes, Seconds
from threefold.plan.cost.collectives import ring_seconds
from threefold.plan.cost.kernels import matrix_seconds, memory_seconds
from threefold.plan.cost.sizes import EndShapes
from threefold.plan.cost.system import System
from threefold.plan.hardware.entry import Hardware


def embedding_passes(ends: EndShapes, hardware: Hardware, system: System) -> Passes:
    """Of the look-up and its gradient."""
    block = ends.block
    outer = block.own_tokens * block.hidden * block.itemsize
    tensor = ring_seconds(
        hardware,
        block.tp,
        "reduce_scatter" if block.sequence_parallel else "all_reduce",
        block.tokens * block.hidden * block.itemsize,
    )
    gathered = ring_seconds(hardware, block.tp, "all_gather", block.tokens * block.hidden * block.itemsize)
    looked_up = memory_seconds(
        hardware, 2 * block.tokens * block.hidden * block.itemsize + (3 * outer if block.hidden_dropout else 0), 3
    )
    return Passes(
        Seconds(memory=looked_up, tensor=tensor),
        Seconds(tensor=gathered if block.sequence_parallel else 0.0),
        Seconds(memory=2 * looked_up),
    )


embedding_seconds = lru_cache(1 << 14)(embedding_passes)
"""The same of sizes that are numbers, kept."""


def head_passes(ends: EndShapes, hardware: Hardware, system: System) -> Passes:
    """Of the last norm, the logits and their loss."""
    block = ends.block
    rows, columns = block.tokens, -(-ends.vocab // block.tp.ranks)
    product = matrix_seconds(hardware, block.dtype, rows, columns, block.hidden, 1, block.itemsize)
    logits = rows * columns
    # Read in the narrow dtype and written wide; maximum, difference, exponential, sum, quotient; and the gradient.
    forward = logits * (block.itemsize + 4 if system.fused_loss else block.itemsize + 4 + 28)
    backward = logits * (block.itemsize + 4 if system.fused_loss else block.itemsize + 4 + 8)
    outer = block.own_tokens * block.hidden * block.itemsize
    activations = block.tokens * block.hidden * block.itemsize
    if block.sequence_parallel:
        sums = (
            ring_seconds(hardware, block.tp, "all_gather", activations),
            ring_seconds(hardware, block.tp, "reduce_scatter", activations),
        )
    else:
        sums = (0.0, ring_seconds(hardware, block.tp, "all_reduce", activations))
    loss = 2 * ring_seconds(hardware, block.tp, "all_reduce", 4 * rows)
    replayed = product if ends.chunk_size and system.chunked_loss else 0.0
    table = block.hidden * columns
    return Passes(
        Seconds(matrix=product, memory=memory_seconds(hardware, forward + 2 * outer, 4), tensor=sums[0] + loss),
        Seconds(matrix=product + replayed, memory=memory_seconds(hardware, backward + 3 * outer, 3), tensor=sums[1]),
        Seconds(matrix=product, memory=memory_seconds(hardware, 8 * table, 0)),
    )


head_seconds = lru_cache(1 << 14)(head_passes)
"""The same of sizes that are numbers, kept."""

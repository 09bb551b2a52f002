"""Estimated seconds of products, collectives, blocks, pipelines and optimizer updates, from their sizes on a rank."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import log2
from typing import Any, Final, NamedTuple

from threefold.config import Config
from threefold.config.schedules import SCHEDULES
from threefold.planner.block import BlockShape
from threefold.planner.hardware import Hardware
from threefold.planner.model_size import ZERO_GRADIENTS, ZERO_WEIGHTS, Group, RankBlock, rank_block
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


def cost_block(config: Config, block: BlockShape, per_node: int, system: System) -> RankBlock:
    """Return a block as one rank computes it, with the groups of its collectives."""
    stride = axis_group(config, "ep", per_node, system).stride
    return rank_block(config, block, per_node=per_node, expert_stride=stride)


BUSIEST = 1.1
"""Load of the busiest rank of experts, as a multiple of the mean number of tokens; the others wait for it."""
_TENSOR_PIECES = 4
"""Chunks of an overlapped tensor-parallel collective and its matrix product; the first chunk is exposed."""

_HOST_FORWARD = 1 / 3
"""Forward pass's fraction of the host's work for a block."""


class Seconds(NamedTuple):
    """Time of a rank by cause.

    Memory is that of norms, activation functions, dropout, sums, softmax and loss, and sorting tokens for experts;
    tensor, context and experts are exposed collectives of these axes; host is Python and autograd work that no kernel
    hides.
    """

    matrix: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return self[0] + self[1] + self[2] + self[3] + self[4] + self[5] + self[6]

    def plus(self, *others: "Seconds") -> "Seconds":
        return Seconds(*map(sum, zip(self, *others, strict=True)))

    def times(self, factor: float) -> "Seconds":
        return Seconds(*(each * factor for each in self))


class Passes(NamedTuple):
    """Time of a layer's passes for one micro-batch; the backward pass for inputs includes any recompute."""

    forward: Seconds
    backward: Seconds
    weight: Seconds

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total + self.weight.total

    def plus(self, *others: "Passes") -> "Passes":
        return Passes(*(first.plus(*rest) for first, *rest in zip(self, *others, strict=True)))


NOTHING = Passes(Seconds(), Seconds(), Seconds())


def block_passes(block: RankBlock, hardware: Hardware, system: System, recompute: str = "none") -> Passes:
    """Estimate the passes of a transformer block for one micro-batch, recomputed as given."""
    linear, core = _linear(block, hardware), _core(block, hardware, system)
    tensor = _tensor(block, _without_latency(hardware, hardware.achievable.tensor_block))
    memory = _memory(block, hardware, system, recompute == "full")
    context = _context(block, _without_latency(hardware, hardware.achievable.context_block))
    experts = 0.0
    if block.experts is not None:  # tokens are sent to their experts and back
        nbytes = block.local_tokens * block.experts.per_token * block.hidden * block.itemsize
        experts = 2 * all_to_all_seconds(hardware, block.group("ep"), nbytes)
    weight_passes = _accumulation(block, hardware, system)
    hidden_by_core = system.overlap_context
    exposed = exposed_part(tensor, linear / 2, _TENSOR_PIECES) if system.overlap_tensor else tensor
    forward = Seconds(
        matrix=linear,
        attention=core[0],
        memory=memory[0],
        tensor=exposed,
        context=positive(context - core[0] * (1 - 1 / block.cp)) if hidden_by_core else context,
        experts=experts,
    )
    forward = forward._replace(host=_host(block, hardware, _HOST_FORWARD, forward.total))
    weight = Seconds(matrix=linear, memory=weight_passes)
    backward_tensor = exposed
    if system.overlap_tensor_backward and not system.overlap_tensor:
        # Of the two collectives of a half block, the input gradient's overlaps with the weight-gradient product.
        serial = tensor / 2 if block.sequence_parallel else 0.0
        backward_tensor = serial + positive(tensor - serial - linear)
    backward = Seconds(
        matrix=linear,
        attention=core[1],
        memory=memory[1],
        tensor=backward_tensor,
        context=positive(2 * context - core[1] * (1 - 1 / block.cp)) if hidden_by_core else 2 * context,
        experts=experts,
    )
    if recompute == "full":
        backward = backward.plus(forward)
    elif recompute == "selective" and system.replays_operations:
        backward = backward.plus(forward._replace(matrix=forward.matrix / 2, attention=0.0))
    elif recompute == "selective":
        backward = backward.plus(Seconds(attention=forward.attention, context=forward.context))
    host = _host(block, hardware, 1 - _HOST_FORWARD, backward.total - backward.host + weight.total)
    return Passes(forward, backward._replace(host=backward.host + host), weight)


block_seconds = lru_cache(1 << 14)(block_passes)
"""Cached `block_passes`, for shapes whose sizes are plain numbers, not arrays."""


def _without_latency(hardware: Hardware, in_block: float) -> Hardware:
    """Return the hardware without link latency where the block's measured overhead already includes it."""
    return replace(hardware, inside=replace(hardware.inside, latency=0.0)) if in_block else hardware


def _host(block: RankBlock, hardware: Hardware, fraction: float, kernels: float) -> float:
    """Return the host work that lengthens a pass: all of it on a CPU, on a GPU what outlasts the kernels."""
    reached = hardware.achievable
    work = reached.block * fraction
    if block.tp > 1:
        work += reached.tensor_block * fraction
    if block.cp > 1:
        work += reached.context_block * fraction
    return work if hardware.device == "cpu" else positive(work - kernels)


def _linear(block: RankBlock, hardware: Hardware) -> float:
    """Return the seconds of a block's matrix products; its passes for input and weight gradients take as long each."""
    rows, hidden, ranks = block.tokens, block.hidden, block.tp
    query, keys = block.local_heads * block.head_dim, 2 * block.local_key_heads * block.head_dim
    columns = query * (2 if block.output_gate else 1) + keys
    found = _product(block, hardware, rows, columns, hidden) + _product(block, hardware, rows, hidden, query)
    if block.experts is None:
        return found + _feed_forward(block, hardware, rows, block.ffn // ranks)
    experts = block.experts
    count = max(1, experts.count // block.ep)
    each = larger(1, BUSIEST * rows * experts.per_token * block.ep // experts.count)
    found += _feed_forward(block, hardware, each, experts.inner // ranks, count)
    found += _product(block, hardware, block.local_tokens, experts.count, hidden)
    return found + (_feed_forward(block, hardware, rows, experts.shared // ranks) if experts.shared else 0.0)


def _feed_forward(block: RankBlock, hardware: Hardware, rows: float, inner: int, count: int = 1) -> float:
    found = _product(block, hardware, rows, inner * (2 if block.gated else 1), block.hidden, count)
    return found + _product(block, hardware, rows, block.hidden, inner, count)


def _product(block: RankBlock, hardware: Hardware, rows: float, columns: int, depth: int, count: int = 1) -> float:
    return matrix_seconds(hardware, block.dtype, rows, columns, depth, count, block.itemsize)


def _core(block: RankBlock, hardware: Hardware, system: System) -> tuple[float, float]:
    """Return the seconds of the attention core, forward and backward."""
    queries = block.tokens * block.local_heads
    if system.flash and (system.drops_in_flash or not block.attention_dropout):
        flops = 4 * queries * block.seen * block.head_dim
        if not system.tuned_attention:
            flops /= hardware.achievable.general_attention
        sizes = min(block.window or block.length, block.length), block.head_dim
        forward = attention_seconds(hardware, block.dtype, flops, *sizes)
        return forward, attention_seconds(hardware, block.dtype, 2.5 * flops, *sizes, backward=True)
    length, rows, count = block.length, block.length // block.cp, block.samples * block.local_heads
    products = _product(block, hardware, rows, length, block.head_dim, count)
    products += _product(block, hardware, rows, block.head_dim, length, count)
    weights = queries * length
    item = block.itemsize
    softmax = (2 if system.fused else 6) * item
    dropped = (2 * item + 1) if block.attention_dropout else 0
    forward = products + memory_seconds(hardware, weights * (softmax + dropped), 2)
    backward = 2 * products + memory_seconds(hardware, weights * ((3 if system.fused else 6) * item + dropped), 2)
    return forward, backward


def _memory(block: RankBlock, hardware: Hardware, system: System, recomputed: bool) -> tuple[float, float]:
    """Return the seconds of memory-bound work, forward and backward, from the bytes it reads and writes."""
    item = block.itemsize
    outer = block.local_tokens * block.hidden
    fused_norm = system.fused_norm and (system.fused_norm_recomputed or not recomputed)
    norm_forward, norm_backward = (
        (2 * item, 3 * item) if fused_norm or not block.rms else (6 * item + 24, 15 * item + 60)
    )
    mask = 1 if block.hidden_dropout else 0
    forward = outer * (block.norms * norm_forward + 2 * (3 * item + mask))
    backward = outer * (block.norms * norm_backward + 2 * (3 * item + (2 * item + mask) * mask))
    kernels = 4.0
    if not system.fused and block.hidden_dropout:
        forward += 2 * outer * 2 * item
        kernels += 2
    experts = block.experts
    width = block.ffn if experts is None else experts.per_token * experts.inner + experts.shared
    inner = block.tokens * width // block.tp  # elements after the activation function
    if block.gated:
        forward += inner * (3 if system.fused else 5) * item
        backward += inner * (5 if system.fused else 8) * item
    else:
        forward += inner * 2 * item
        backward += inner * 3 * item
    kernels += 1 if system.fused else 2
    if not system.fused:  # queries, keys, values and the output permute their dims
        copied = 2 * block.tokens * (block.local_heads + block.local_key_heads) * block.head_dim
        forward += copied * 2 * item
        backward += copied * 2 * item
        kernels += 4
    if not system.fused and block.cp > 1 and not block.ring:
        # Keys and values are stacked, gathered and reordered; each chunk of queries takes a slice, whose gradient is
        # zero elsewhere; the gradients of both chunks are summed, reordered and scattered.
        keys = 2 * block.samples * block.length * block.local_key_heads * block.head_dim
        queries = block.tokens * block.local_heads * block.head_dim
        forward += (2 * keys // block.cp + 2 * keys + 2 * queries) * item
        backward += (12 * keys + 4 * queries) * item
    if block.output_gate:  # a sigmoid and a product
        gates = block.tokens * block.local_heads * block.head_dim
        forward += gates * (3 if system.fused else 5) * item
        backward += gates * (5 if system.fused else 8) * item
        kernels += 1 if system.fused else 2
    if block.rotary:
        turned = block.tokens * (block.local_heads + block.local_key_heads) * block.head_dim
        passes = 2 if system.fused else 8
        forward += turned * passes * item
        backward += turned * passes * item
        kernels += 1 if system.fused else 6
    if block.biased and hardware.device == "cpu":  # a GPU adds the bias in the product's epilogue
        columns = (block.local_heads + 2 * block.local_key_heads) * block.head_dim + block.ffn // block.tp
        added = block.tokens * columns + 2 * outer
        forward += added * 2 * item
        backward += added * item
    if experts is not None:  # sorted by rank, then by expert among all received tokens, and back
        rows = (block.local_tokens + block.tokens) * experts.per_token * block.hidden
        forward += 2 * 2 * rows * item
        backward += 2 * 2 * rows * item
        kernels += 8
    return memory_seconds(hardware, forward, kernels), memory_seconds(hardware, backward, kernels)


def _accumulation(block: RankBlock, hardware: Hardware, system: System) -> float:
    """Return the seconds of accumulating weight gradients over micro-batches, reading and writing fp32."""
    query, keys = block.local_heads * block.head_dim, 2 * block.local_key_heads * block.head_dim
    inner = block.ffn // block.tp
    if block.experts is not None:
        inner = block.experts.inner * max(1, block.experts.count // block.ep) // block.tp
        inner += block.experts.shared // block.tp
    query *= 3 if block.output_gate else 2
    elements = block.hidden * (query + keys + inner * (3 if block.gated else 2))
    return memory_seconds(hardware, elements * (8 if system.fused_gradients else 8 + 2 * block.itemsize), 0)


def _tensor(block: RankBlock, hardware: Hardware) -> float:
    """Return the seconds of one pass's tensor-parallel collectives: per half block an all-reduce, or with sequence
    parallelism an all-gather and a reduce-scatter. An expert layer repeats them once per expert that a token visits."""
    operations = ("all_gather", "reduce_scatter") if block.sequence_parallel else ("all_reduce",)
    each = sum(ring_seconds(hardware, block.group("tp"), operation, block.whole) for operation in operations)
    return each * (2 if block.experts is None else 1 + block.experts.per_token)


def _context(block: RankBlock, hardware: Hardware) -> float:
    """Return the seconds of fetching the other context-parallel ranks' keys and values."""
    local = 2 * block.tokens * block.local_key_heads * block.head_dim * block.itemsize
    if block.ring:
        return (block.cp - 1) * send_seconds(hardware, block.group("cp"), local)
    return ring_seconds(hardware, block.group("cp"), "all_gather", local * block.cp)


def embedding_passes(block: RankBlock, hardware: Hardware) -> Passes:
    """Estimate the embedding look-up, its collectives and its gradient, from the blocks after it."""
    operation = "reduce_scatter" if block.sequence_parallel else "all_reduce"
    tensor = ring_seconds(hardware, block.group("tp"), operation, block.whole)
    gathered = ring_seconds(hardware, block.group("tp"), "all_gather", block.whole) if block.sequence_parallel else 0.0
    looked_up = memory_seconds(hardware, 2 * block.whole + (3 * block.outer if block.hidden_dropout else 0), 3)
    forward = Seconds(memory=looked_up, tensor=tensor)
    return Passes(forward, Seconds(tensor=gathered), Seconds(memory=2 * looked_up))


def head_passes(block: RankBlock, vocab: int, chunk_size: int, hardware: Hardware, system: System) -> Passes:
    """Estimate the final norm, the logits and the loss, from the blocks before it and the whole vocabulary's size."""
    rows, columns, group = block.tokens, -(-vocab // block.tp), block.group("tp")
    product = _product(block, hardware, rows, columns, block.hidden)
    logits = rows * columns
    # Unfused, the loss reads narrow logits and writes wide ones, then maximum, difference, exponential, sum, quotient
    # and gradient.
    forward = logits * (block.itemsize + 4 if system.fused_loss else block.itemsize + 4 + 28)
    backward = logits * (block.itemsize + 4 if system.fused_loss else block.itemsize + 4 + 8)
    outer = block.outer
    gathered = ring_seconds(hardware, group, "all_gather", block.whole) if block.sequence_parallel else 0.0
    summed = ring_seconds(hardware, group, "reduce_scatter" if block.sequence_parallel else "all_reduce", block.whole)
    loss = 2 * ring_seconds(hardware, group, "all_reduce", 4 * rows)
    replayed = product if chunk_size and system.chunked_loss else 0.0
    table = block.hidden * columns
    return Passes(
        Seconds(matrix=product, memory=memory_seconds(hardware, forward + 2 * outer, 4), tensor=gathered + loss),
        Seconds(matrix=product + replayed, memory=memory_seconds(hardware, backward + 3 * outer, 3), tensor=summed),
        Seconds(matrix=product, memory=memory_seconds(hardware, 8 * table, 0)),
    )

"""Estimated seconds by cause of the passes of a layer, from its sizes on a rank: embeddings, blocks and heads."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from threefold.config import Config
from threefold.planner.block import PRODUCTS, BlockShape
from threefold.planner.cost import (
    all_to_all_seconds,
    attention_seconds,
    axis_group,
    exposed_part,
    larger,
    matrix_seconds,
    memory_seconds,
    positive,
    ring_seconds,
    send_seconds,
)
from threefold.planner.hardware import Hardware
from threefold.planner.rank_block import RankBlock, rank_block
from threefold.planner.systems import System


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
    to_inputs, to_weights, joined = linear, linear, 0.0
    if block.frozen or block.adapters:
        linear, to_inputs, to_weights, joined = _trained_linear(block, hardware)
    tensor = _tensor(block, _without_latency(hardware, hardware.achievable.tensor_block))
    memory = _memory(block, hardware, system, recompute == "full")
    context = _context(block, _without_latency(hardware, hardware.achievable.context_block))
    experts = 0.0
    if block.experts is not None:  # tokens are sent to their experts and back
        nbytes = block.local_tokens * block.experts.per_token * block.hidden * block.itemsize
        experts = 2 * all_to_all_seconds(hardware, block.group("ep"), nbytes)
    weight_passes = _accumulation(block, hardware, system)
    hidden_by_core = system.overlap_context
    exposed = [exposed_part(each, linear / 2, _TENSOR_PIECES) if system.overlap_tensor else each for each in tensor]
    forward = Seconds(
        matrix=linear,
        attention=core[0],
        memory=memory[0] + joined,
        tensor=exposed[0],
        context=positive(context - core[0] * (1 - 1 / block.cp)) if hidden_by_core else context,
        experts=experts,
    )
    forward = forward._replace(host=_host(block, hardware, _HOST_FORWARD, forward.total))
    weight = Seconds(matrix=to_weights, memory=weight_passes)
    backward_tensor = exposed[1]
    if system.overlap_tensor_backward and not system.overlap_tensor:
        # Of the two collectives of a half block, the input gradient's overlaps with the weight-gradient product.
        serial = tensor[1] / 2 if block.sequence_parallel else 0.0
        backward_tensor = serial + positive(tensor[1] - serial - linear)
    backward = Seconds(
        matrix=to_inputs,
        attention=core[1] if block.reaches("proj") else 0.0,
        memory=memory[1] + joined,
        tensor=backward_tensor,
        context=positive(2 * context - core[1] * (1 - 1 / block.cp)) if hidden_by_core else 2 * context,
        experts=experts,
    )
    if block.is_idle:
        return Passes(forward, Seconds(), Seconds())
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
    found = sum(_product(block, hardware, *sizes) for sizes in block.products_of_attention)
    if block.experts is None:
        return found + _feed_forward(block, hardware, rows, block.ffn // ranks)
    experts = block.experts
    count = max(1, experts.count // block.ep)
    each = larger(1, BUSIEST * rows * experts.per_token * block.ep // experts.count)
    found += _feed_forward(block, hardware, each, experts.inner // ranks, count)
    found += _product(block, hardware, block.local_tokens, experts.count, hidden)
    return found + (_feed_forward(block, hardware, rows, experts.shared // ranks) if experts.shared else 0.0)


def _trained_linear(block: RankBlock, hardware: Hardware) -> tuple[float, float, float, float]:
    """Return the seconds of the products of a block with frozen ones and adapters: of the forward pass, and of the
    gradients of inputs and of weights; and of adding adapters' outputs, in memory."""
    forward = inputs = weights = joined = 0.0
    rows = {adapter.product: adapter.rows for adapter in block.adapters}
    for name in PRODUCTS:
        columns, depth = block.product(name)
        own, reached = _product(block, hardware, block.tokens, columns, depth), block.reaches(name)
        forward += own
        inputs += own if reached else 0.0
        weights += 0.0 if name in block.frozen else own
        if name in rows:
            narrowing = _product(block, hardware, block.tokens, rows[name], depth)
            widening = _product(block, hardware, block.tokens, columns, rows[name])
            forward += narrowing + widening
            inputs += widening + (narrowing if reached else 0.0)
            weights += narrowing + widening
            joined += memory_seconds(hardware, 3 * block.tokens * columns * block.itemsize, 3)
    return forward, inputs, weights, joined


def _feed_forward(block: RankBlock, hardware: Hardware, rows: float, inner: int, count: int = 1) -> float:
    found = _product(block, hardware, rows, inner * (2 if block.gated else 1), block.hidden, count)
    return found + _product(block, hardware, rows, block.hidden, inner, count)


def _product(block: RankBlock, hardware: Hardware, rows: float, columns: int, depth: int, count: int = 1) -> float:
    return matrix_seconds(hardware, block.dtype, rows, columns, depth, count, block.itemsize)


def _core(block: RankBlock, hardware: Hardware, system: System) -> tuple[float, float]:
    """Return the seconds of the attention core, forward and backward."""
    queries, value = block.tokens * block.local_heads, block.value_dim
    if system.flash and (system.drops_in_flash or not block.attention_dropout):
        width = block.head_dim + value
        flops = 2 * queries * block.seen * width
        if not system.tuned_attention:
            flops /= hardware.achievable.general_attention
        sizes = min(block.window or block.length, block.length), block.head_dim
        forward = attention_seconds(hardware, block.dtype, flops, *sizes)
        again = (3 * block.head_dim + 2 * value) / width  # scores again, and two products for each of the forward pass
        return forward, attention_seconds(hardware, block.dtype, again * flops, *sizes, backward=True)
    length, rows, count = block.length, block.length // block.cp, block.samples * block.local_heads
    products = _product(block, hardware, rows, length, block.head_dim, count)
    products += _product(block, hardware, rows, value, length, count)
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
        queries, keys = block.tokens * block.local_heads, block.key_tokens * block.local_key_heads
        copied = (queries + keys) * (block.head_dim + block.value_dim)
        forward += copied * 2 * item
        backward += copied * 2 * item
        kernels += 4
    if not system.fused and block.cp > 1 and not block.ring and block.latents is None:
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
    if block.latents is not None:  # their norms, and the parts of queries and keys that are joined
        latents = block.local_tokens * (block.latents.queries + block.latents.shared)
        joined = (block.tokens + block.key_tokens) * block.local_heads * block.head_dim
        forward += latents * norm_forward + joined * 2 * item
        backward += latents * norm_backward + joined * 2 * item
        kernels += 4
    if block.rotary:
        turned = block.tokens * (block.local_heads + block.local_key_heads) * block.head_dim
        if block.latents is not None:
            turned = (block.tokens * block.local_heads + block.local_tokens) * block.latents.rotary
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
    inner = block.ffn // block.tp
    if block.experts is not None:
        inner = block.experts.inner * max(1, block.experts.count // block.ep) // block.tp
        inner += block.experts.shared // block.tp
    if block.frozen or block.adapters:
        sizes = {name: block.product(name) for name in PRODUCTS}
        elements = sum(columns * depth for name, (columns, depth) in sizes.items() if name not in block.frozen)
        elements += sum(adapter.rows * sum(sizes[adapter.product]) for adapter in block.adapters)
        return memory_seconds(hardware, elements * (8 if system.fused_gradients else 8 + 2 * block.itemsize), 0)
    attention = sum(columns * depth for _, columns, depth in block.products_of_attention)
    elements = attention + block.hidden * inner * (3 if block.gated else 2)
    return memory_seconds(hardware, elements * (8 if system.fused_gradients else 8 + 2 * block.itemsize), 0)


def _tensor(block: RankBlock, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds of the tensor-parallel collectives of the forward and of the backward pass.

    Each half block has an all-reduce, or with sequence parallelism an all-gather and a reduce-scatter. An expert layer
    repeats them once per expert that a token visits. Latent attention gathers its latents, or reduces their gradients.
    """
    operations = ("all_gather", "reduce_scatter") if block.sequence_parallel else ("all_reduce",)
    each = sum(ring_seconds(hardware, block.group("tp"), operation, block.whole) for operation in operations)
    if block.latents is None:
        both = each * (2 if block.experts is None else 1 + block.experts.per_token)
        return both, both
    width = (block.latents.queries or block.hidden) + block.latents.shared
    narrow = block.tokens * width * block.itemsize
    rest = each * (1 if block.experts is None else block.experts.per_token)
    if block.sequence_parallel:
        rest += sum(
            ring_seconds(hardware, block.group("tp"), *sizes)
            for sizes in zip(operations, (narrow, block.whole), strict=True)
        )
        return rest, rest
    return rest + each, rest + ring_seconds(hardware, block.group("tp"), "all_reduce", narrow)


def _context(block: RankBlock, hardware: Hardware) -> float:
    """Return the seconds of fetching the other context-parallel ranks' keys and values."""
    width = block.local_key_heads * (block.head_dim + block.value_dim)
    if block.latents is not None and not block.ring:
        width = block.latents.shared
    local = block.tokens * width * block.itemsize
    if block.ring:
        return (block.cp - 1) * send_seconds(hardware, block.group("cp"), local)
    return ring_seconds(hardware, block.group("cp"), "all_gather", local * block.cp)


def embedding_passes(block: RankBlock, hardware: Hardware, trains: bool = True) -> Passes:
    """Estimate the embedding look-up, its collectives and its gradient, from the blocks after it."""
    operation = "reduce_scatter" if block.sequence_parallel else "all_reduce"
    tensor = ring_seconds(hardware, block.group("tp"), operation, block.whole)
    gathered = ring_seconds(hardware, block.group("tp"), "all_gather", block.whole) if block.sequence_parallel else 0.0
    looked_up = memory_seconds(hardware, 2 * block.whole + (3 * block.outer if block.hidden_dropout else 0), 3)
    forward = Seconds(memory=looked_up, tensor=tensor)
    if not trains:
        return Passes(forward, Seconds(), Seconds())
    return Passes(forward, Seconds(tensor=gathered), Seconds(memory=2 * looked_up))


def head_passes(
    block: RankBlock, vocab: int, chunk_size: int, hardware: Hardware, system: System, trains: bool = True
) -> Passes:
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
        Seconds(matrix=product, memory=memory_seconds(hardware, 8 * table, 0)) if trains else Seconds(),
    )


def further_passes(
    block: RankBlock, depths: int, recompute: str, vocab: int, chunk_size: int, hardware: Hardware, system: System
) -> Passes:
    """Estimate multi-token prediction of some further tokens, each with a block of these sizes."""
    if not depths:
        return NOTHING
    joined = _product(block, hardware, block.local_tokens, block.hidden, 2 * block.hidden)
    # Two norms more than a head has, and features and embeddings beside each other.
    forward, backward = (memory_seconds(hardware, passes * block.outer, 3) for passes in (8, 10))
    weights = memory_seconds(hardware, 8 * 2 * block.hidden**2, 0)
    one = Passes(
        Seconds(matrix=joined, memory=forward),
        Seconds(matrix=joined, memory=backward),
        Seconds(matrix=joined, memory=weights),
    ).plus(
        embedding_passes(block, hardware),
        block_passes(block, hardware, system, recompute),
        head_passes(block, vocab, chunk_size, hardware, system),
    )
    return NOTHING.plus(*[one] * depths)

"""What a layer of a stage needs memory for: kept for its backward pass, and in passing at its largest moments.

The moments are those of this package's layers (`models`, `parallel`), in the order in which autograd runs: the first
product of a block's backward pass has the gradients of the block's output and of the inner features beside all that is
kept; a head has its logits and their gradients.
"""

from dataclasses import dataclass
from functools import lru_cache

from threefold.ops.sizes import LOGITS_AT_ONCE
from threefold.plan.activations import BlockSizes, block_bytes, head_bytes


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of a layer and a micro-batch.

    Attributes:
        kept: from the forward to the backward pass.
        forward: beside it, at the largest moment of the forward pass.
        backward: beside it, at the largest moment of the backward pass, before anything of the layer is freed;
            gradients of weights are not among it.
        ending: beside what layers before it keep, when the last gradients of its weights are computed.
        largest: elements of the weight whose gradient is there at the moment of `backward`.
        deferred: from a backward pass for the input to the pass for the weights.
    """

    kept: int
    forward: int
    backward: int
    ending: int
    largest: int
    deferred: int = 0


@lru_cache(maxsize=65536)
def block_layer(sizes: BlockSizes, recompute: str) -> LayerBytes:
    """Those of a transformer block.

    Args:
        sizes: of the block.
        recompute: as `train.recompute`, for a block that it treats.
    """
    outer = sizes.own_tokens * sizes.hidden * sizes.itemsize
    whole = sizes.tokens * sizes.hidden * sizes.itemsize
    kept, everything = block_bytes(sizes, recompute), block_bytes(sizes)
    # A sequence-parallel rank gathers the gradient of its output, and the input of the feed-forward network again.
    gathered = whole if sizes.sequence_parallel and sizes.tp > 1 else 0
    passing, largest, inner = _feed_forward(sizes)
    backward = outer + gathered + passing
    if recompute == "full":
        backward += everything - outer
    if recompute == "selective":
        backward = max(backward, _core_again(sizes, kept, everything) + 2 * outer)
    # At the products for queries, keys and values: their gradients, the layer's input and norm, two gradients of it.
    queries = sizes.queries + 2 * sizes.keys
    ending = 2 * queries + 3 * outer + (whole if gathered else 0)
    return LayerBytes(kept, 0, backward, ending, largest, _deferred(sizes, whole, inner))


def _core_again(sizes: BlockSizes, kept: int, everything: int) -> int:
    """What the attention core has when it is computed again: what it keeps otherwise, and where attention weights are
    among that, their gradients; without what the feed-forward network has freed."""
    *_, inner = _feed_forward(sizes)
    again = everything - kept
    return again + (again // 2 if sizes.attention != "fused" else 0) - 2 * inner


def _feed_forward(sizes: BlockSizes) -> tuple[int, int, int]:
    """The largest moment of the backward pass of a feed-forward network: bytes of activations' gradients less what is
    freed by then, elements of gradients of weights; and bytes of the inner features."""
    item, experts = sizes.itemsize, sizes.experts
    if experts is None:  # the product for the weights of its second layer
        inner = sizes.tokens * sizes.ffn // sizes.tp * item
        return inner, sizes.ffn // sizes.tp * sizes.hidden, inner
    rows = sizes.tokens * experts.per_token
    inner = rows * experts.inner // sizes.tp * item
    width = (1 if sizes.kernels.grouped else 2) * (experts.held or experts.count) * experts.inner // sizes.tp
    second = inner, width * sizes.hidden
    first = -rows * sizes.hidden * item - 2 * inner, 2 * width * sizes.hidden  # that of the first, twice as wide
    passing, largest = max(first, second, key=lambda moment: moment[0] + item * moment[1])
    return passing, largest, inner


def _deferred(sizes: BlockSizes, whole: int, inner: int) -> int:
    """Inputs of linear layers and gradients of their outputs."""
    rows = sizes.queries + 2 * sizes.keys
    products = (2 if sizes.llama else 1) * inner
    return 4 * whole + sizes.queries + rows + inner + products


@lru_cache(maxsize=65536)
def head_layer(sizes: BlockSizes, vocab: int, chunk_size: int) -> LayerBytes:
    """Those of the final norm, the product with the vocabulary and the loss.

    Args:
        sizes: of the blocks before.
        vocab: rows of the whole table.
        chunk_size: as `train.loss_chunk_size`.
    """
    outer = sizes.own_tokens * sizes.hidden * sizes.itemsize
    whole = sizes.tokens * sizes.hidden * sizes.itemsize
    columns, item, wide = -(-vocab // sizes.tp), sizes.itemsize, sizes.wide
    narrow = item < wide
    kept = outer + head_bytes(sizes, vocab, chunk_size) - outer  # its input is the output of the layer before
    gathered = whole if sizes.sequence_parallel and sizes.tp > 1 else 0
    weight = columns * sizes.hidden
    if chunk_size:
        logits = sizes.tokens * min(chunk_size, columns)
        run = _run_bytes(sizes, logits)
        forward = logits * item + run + gathered
        backward = 2 * logits * item + (run if narrow else 0) + whole // item * wide + gathered
        return LayerBytes(kept, forward, backward, 3 * whole, weight)
    logits = sizes.tokens * columns
    # What is kept of the logits is freed before the products.
    normed = kept - logits * (wide if sizes.kernels.keeps_probabilities else item)
    if not sizes.kernels.keeps_probabilities:
        run = _run_bytes(sizes, logits)
        forward, backward = run, logits * item + (run if narrow else 0)
    elif sizes.tp > 1:
        forward = backward = logits * (wide + item if narrow else wide)
    else:
        forward, backward = logits * (wide + item if narrow else item), 2 * logits * wide
    ending = normed + logits * item + whole + gathered
    return LayerBytes(kept, forward + gathered, backward + gathered, ending, 0, logits * item + whole)


def _run_bytes(sizes: BlockSizes, logits: int) -> int:
    """Of the wide copy of some rows of logits."""
    return sizes.wide * (logits if sizes.kernels.widens_logits else min(logits, LOGITS_AT_ONCE))


@lru_cache(maxsize=65536)
def embedding_layer(sizes: BlockSizes, vocab: int, positions: int, dropout: bool, device: str) -> LayerBytes:
    """Those of the embeddings, whose output is the input of the first block and counted there.

    Args:
        sizes: of the blocks after it.
        vocab: rows of the whole table.
        positions: rows of the table of learned positions; 0 for none.
        dropout: whether its output has any.
        device: `cpu` or `cuda`.
    """
    outer = sizes.own_tokens * sizes.hidden * sizes.itemsize
    whole = sizes.tokens * sizes.hidden * sizes.itemsize
    kept = sizes.tokens * (8 + (1 if sizes.tp > 1 else 0)) + (outer if dropout else 0)
    backward = outer + (whole if sizes.tp > 1 else 0)
    if device == "cpu" and sizes.itemsize < sizes.wide:  # gradients of a token are added up in fp32
        backward += whole + sizes.tokens * sizes.hidden * sizes.wide
    return LayerBytes(kept, 0, backward, backward, -(-vocab // sizes.tp) * sizes.hidden)

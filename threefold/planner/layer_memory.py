"""Memory of one layer: activations kept for its backward pass, and working memory at its largest moments.

The moments follow the order in which autograd runs this package's layers (`models`, `parallel`). The first product of a
block's backward pass, for example, needs the gradients of the block's output and of the inner features beside
everything kept; a head needs its logits and their gradients.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from threefold.config import Config
from threefold.constants import LOGITS_AT_ONCE
from threefold.planner.activations import BlockSizes, block_bytes, block_sizes, head_bytes
from threefold.planner.systems import Keeps


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer for one micro-batch.

    Attributes:
        kept: bytes kept from the forward to the backward pass.
        forward: additional bytes at the peak of the forward pass.
        backward: additional bytes at the peak of the backward pass, before frees and without weight gradients.
        ending: bytes beside those that earlier layers keep, when the last weight gradients are computed.
        largest: elements of the weight whose gradient exists at the moment of `backward`.
        deferred: bytes kept from the backward pass for inputs to the backward pass for weights.
    """

    kept: int
    forward: int
    backward: int
    ending: int
    largest: int
    deferred: int = 0


@lru_cache(maxsize=65536)
def block_layer(sizes: BlockSizes, recompute: str) -> LayerBytes:
    """Return the memory of a transformer block.

    Args:
        sizes: sizes of the block on the rank.
        recompute: `train.recompute`, for a block that it applies to.
    """
    outer = sizes.own_tokens * sizes.hidden * sizes.itemsize
    whole = sizes.tokens * sizes.hidden * sizes.itemsize
    kept, everything = block_bytes(sizes, recompute), block_bytes(sizes)
    # A sequence-parallel rank gathers its output's gradient, and once more the feed-forward network's input.
    gathered = whole if sizes.sequence_parallel and sizes.tp > 1 else 0
    passing, largest, inner = _feed_forward(sizes)
    backward = outer + gathered + passing
    if recompute == "full":
        backward += everything - outer
    if recompute == "selective":
        backward = max(backward, _core_again(sizes, kept, everything) + 2 * outer)
    # The products for queries, keys and values need their gradients, the layer's input and norm, and two input
    # gradients.
    queries = sizes.queries + 2 * sizes.keys
    ending = 2 * queries + 3 * outer + (whole if gathered else 0)
    return LayerBytes(kept, 0, backward, ending, largest, _deferred(sizes, whole, inner))


def _core_again(sizes: BlockSizes, kept: int, everything: int) -> int:
    """Return the working memory of a recomputed attention core: the tensors it would otherwise keep and the gradients
    of unfused attention weights, minus what the feed-forward network has freed."""
    *_, inner = _feed_forward(sizes)
    again = everything - kept
    return again + (again // 2 if sizes.attention != "fused" else 0) - 2 * inner


def _feed_forward(sizes: BlockSizes) -> tuple[int, int, int]:
    """Return the peak of a feed-forward network's backward pass: bytes of activation gradients minus bytes freed,
    elements of weight gradients, and bytes of the inner features."""
    item, experts = sizes.itemsize, sizes.experts
    if experts is None:  # the weight-gradient product of its second layer
        inner = sizes.tokens * sizes.ffn // sizes.tp * item
        return inner, sizes.ffn // sizes.tp * sizes.hidden, inner
    rows = sizes.tokens * experts.per_token
    inner = rows * experts.inner // sizes.tp * item
    width = (1 if sizes.kernels.grouped else 2) * (experts.held or experts.count) * experts.inner // sizes.tp
    second = inner, width * sizes.hidden
    first = -rows * sizes.hidden * item - 2 * inner, 2 * width * sizes.hidden  # the first layer's, twice as wide
    passing, largest = max(first, second, key=lambda moment: moment[0] + item * moment[1])
    return passing, largest, inner


def _deferred(sizes: BlockSizes, whole: int, inner: int) -> int:
    """Return the bytes of the inputs of linear layers and the gradients of their outputs."""
    rows = sizes.queries + 2 * sizes.keys
    products = (2 if sizes.llama else 1) * inner
    return 4 * whole + sizes.queries + rows + inner + products


@lru_cache(maxsize=65536)
def head_layer(sizes: BlockSizes, vocab: int, chunk_size: int) -> LayerBytes:
    """Return the memory of the final norm, the vocabulary projection and the loss.

    Args:
        sizes: sizes of the blocks before it.
        vocab: vocabulary size of the whole model.
        chunk_size: `train.loss_chunk_size`.
    """
    outer = sizes.own_tokens * sizes.hidden * sizes.itemsize
    whole = sizes.tokens * sizes.hidden * sizes.itemsize
    columns, item, wide = -(-vocab // sizes.tp), sizes.itemsize, sizes.wide
    narrow = item < wide
    kept = outer + head_bytes(sizes, vocab, chunk_size) - outer  # its input is the previous layer's output
    gathered = whole if sizes.sequence_parallel and sizes.tp > 1 else 0
    weight = columns * sizes.hidden
    if chunk_size:
        logits = sizes.tokens * min(chunk_size, columns)
        run = _run_bytes(sizes, logits)
        forward = logits * item + run + gathered
        backward = 2 * logits * item + (run if narrow else 0) + whole // item * wide + gathered
        return LayerBytes(kept, forward, backward, 3 * whole, weight)
    logits = sizes.tokens * columns
    # The kept logits are freed before the products.
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
    """Return the bytes of the wide copy of some rows of logits."""
    return sizes.wide * (logits if sizes.kernels.widens_logits else min(logits, LOGITS_AT_ONCE))


@lru_cache(maxsize=65536)
def embedding_layer(sizes: BlockSizes, vocab: int, positions: int, dropout: bool, device: str) -> LayerBytes:
    """Return the memory of the embeddings; their output counts as the first block's input.

    Args:
        sizes: sizes of the blocks after it.
        vocab: vocabulary size of the whole model.
        positions: rows of the learned position table; 0 for none.
        dropout: whether the output has dropout.
        device: `cpu` or `cuda`.
    """
    outer = sizes.own_tokens * sizes.hidden * sizes.itemsize
    whole = sizes.tokens * sizes.hidden * sizes.itemsize
    kept = sizes.tokens * (8 + (1 if sizes.tp > 1 else 0)) + (outer if dropout else 0)
    backward = outer + (whole if sizes.tp > 1 else 0)
    if device == "cpu" and sizes.itemsize < sizes.wide:  # a CPU accumulates a token's gradients in fp32
        backward += whole + sizes.tokens * sizes.hidden * sizes.wide
    return LayerBytes(kept, 0, backward, backward, -(-vocab // sizes.tp) * sizes.hidden)


class Moment(NamedTuple):
    """Bytes by cause at one moment of a pass, relative to its beginning.

    Attributes:
        activations: kept activations; negative for those that the pass has freed.
        working: transient gradients of activations and weights, and recomputed activations.
        logits: working memory of the head.
        gradients: weight gradients until they are reduced.
        weights: gathered weights (ZeRO 3).
        buffers: buffers of collectives.
    """

    activations: float = 0
    working: float = 0
    logits: float = 0
    gradients: float = 0
    weights: float = 0
    buffers: float = 0

    @property
    def total(self) -> float:
        return sum(self)

    def plus(self, **changes: float) -> "Moment":
        return self._replace(**{name: getattr(self, name) + value for name, value in changes.items()})


@dataclass(frozen=True)
class Run:
    """Consecutive layers of a stage that are alike.

    Attributes:
        layer: bytes of one layer for one micro-batch.
        count: number of layers.
        elements: gathered weight elements of one layer, without shared weights.
        is_head, is_embedding: whether the run is the model's last layer, or its first.
    """

    layer: LayerBytes
    count: int
    elements: int
    is_head: bool = False
    is_embedding: bool = False


@dataclass(frozen=True)
class GradientSharing:
    """Treatment of gradients and gathered weights in a stage.

    Attributes:
        zero: `parallel.zero`.
        ranks: number of ranks that shard a replica.
        narrow, wide: bytes per element of compute weights and of master weights.
        tied: elements of weights shared by layers of the stage, gathered for all of them together.
        in_place: whether weight gradients accumulate directly into their sums.
        repeated: whether an earlier micro-batch has run.
        grows: whether accumulated gradients take memory only as a backward pass makes them.
    """

    zero: int = 0
    ranks: int = 1
    narrow: int = 4
    wide: int = 4
    tied: int = 0
    in_place: bool = False
    repeated: bool = True
    grows: bool = False

    @property
    def gathers_again(self) -> bool:
        """Whether weights are freed after each use."""
        return self.zero == 3

    @property
    def reduces_each(self) -> bool:
        """Whether a layer's gradients are reduce-scattered after its backward pass."""
        return self.zero > 1

    def new_gradients(self, elements: float) -> float:
        """Return the bytes of accumulated gradients that a backward pass allocates; 0 where they already exist."""
        if not self.zero or not self.grows:
            return 0
        return elements * self.wide / (1 if self.zero == 1 else self.ranks)

    def gradient(self, elements: float) -> float:
        """Return the bytes of weight gradients as a backward pass computes them."""
        return 0 if self.in_place else elements * self.narrow


def forward_moment(runs: Sequence[Run], sharing: GradientSharing) -> Moment:
    """Return the peak of a forward pass, which is at its end, relative to all its activations."""
    last = runs[-1]
    moment = Moment()
    if last.is_head:
        moment = moment.plus(logits=last.layer.forward)
    if sharing.gathers_again:
        moment = moment.plus(weights=sharing.narrow * (last.elements + sharing.tied))
    return moment


def backward_moments(runs: Sequence[Run], sharing: GradientSharing, deferring: bool) -> Iterator[Moment]:
    """Yield the candidates for the peak of a backward pass, one or a few for each run of layers.

    Args:
        runs: runs of the stage, in order.
        sharing: treatment of the stage's gradients and weights.
        deferring: whether weight gradients wait for a pass of their own.
    """
    scattered = _last_group(runs, sharing) if sharing.reduces_each and sharing.repeated else 0
    freed, tied, reduced = 0.0, 0.0, 0.0  # a tied weight has one gradient once both of its uses have theirs
    for place in range(len(runs) - 1, -1, -1):
        run, layer = runs[place], runs[place].layer
        # Torch prefetches the previous layer, but not the embeddings, whose backward pass needs no weights.
        before = runs[place - 1].elements if place and not runs[place - 1].is_embedding else 0
        each = layer.kept - (layer.deferred if deferring else 0)
        for number in sorted({0, max(0, run.count - 2), run.count - 1}):
            ahead = run.elements if number < run.count - 1 else before
            if number:
                scattered = run.elements
            new = sharing.new_gradients(reduced + number * run.elements)
            for moment in _of_layer(run, sharing, freed + number * each, tied, ahead, scattered, deferring):
                yield moment.plus(gradients=new)
        freed += run.count * each
        reduced += run.count * run.elements
        scattered = run.elements or scattered
        tied = layer.largest or (run.count and sharing.tied) if run.is_head else tied


def _of_layer(
    run: Run, sharing: GradientSharing, freed: float, tied: float, ahead: float, scattered: float, deferring: bool
) -> Iterator[Moment]:
    """Yield the moments of one layer's backward pass.

    Args:
        freed: bytes that later layers have freed.
        tied: elements of a tied weight's gradient that waits for its second use.
        ahead: elements of the previous layer's weights, which are prefetched.
        scattered: elements whose reduce-scatter still holds its buffer.
        deferring: see `backward_moments`.
    """
    layer, narrow, wide = run.layer, sharing.narrow, sharing.wide
    own = run.elements + (sharing.tied if run.is_head or run.is_embedding else 0)
    start = Moment(activations=-freed, gradients=sharing.gradient(tied))
    if sharing.reduces_each:
        start = start.plus(buffers=scattered * wide)
    if sharing.gathers_again:
        start = start.plus(weights=(run.elements + sharing.tied) * narrow, buffers=ahead * narrow)
    cause = {"logits" if run.is_head else "working": layer.backward}
    largest = 0 if deferring and not run.is_embedding else sharing.gradient(layer.largest)
    yield start.plus(**cause, gradients=largest)
    if run.is_head and not deferring:  # the weight's gradient, once the probabilities are freed
        yield start.plus(activations=-layer.kept, logits=layer.ending, gradients=sharing.gradient(own))
    if sharing.zero:
        ended = start.plus(activations=-layer.kept, working=layer.ending, gradients=sharing.gradient(own))
        yield ended
        if sharing.reduces_each:
            freed_weights = run.elements * narrow if sharing.gathers_again else 0
            buffers = own * wide * (1 + 1 / sharing.ranks) - scattered * wide
            yield ended.plus(weights=-freed_weights, working=-layer.ending, buffers=buffers)


def _last_group(runs: Sequence[Run], sharing: GradientSharing) -> int:
    """Return the elements that a backward pass reduce-scatters last."""
    return sharing.tied or next((run.elements for run in runs if run.elements), 0)


class LayerMemory:
    """Memory of a model's layers on a rank for one micro-batch.

    Args:
        config: resolved config of the run.
        device: `cpu` or `cuda`.
        keeps: memory behaviour of the training system.
        layers: names of all layers, in order.
        replayed: names of recomputed layers.
    """

    def __init__(
        self, config: Config, device: str, keeps: Keeps, layers: Sequence[str], replayed: Collection[str]
    ) -> None:
        self._config, self._device, self._keeps = config, device, keeps
        self._layers, self._replayed = layers, replayed
        self._blocks: dict[object, tuple[BlockSizes, LayerBytes]] = {}

    @property
    def output(self) -> int:
        """Bytes of a block's output."""
        block, _ = self._block(0)
        return block.own_tokens * block.hidden * block.itemsize

    @property
    def narrow_logits(self) -> int:
        """Bytes of logits that are cast to fp32 for the loss; 0 where none are."""
        block, chunk = self._block(0)[0], self._config.train.loss_chunk_size if self._keeps.chunked_loss else 0
        if chunk or not self._keeps.casts_logits or block.itemsize == block.wide:
            return 0
        columns = self._config.model.vocab_size // (1 if self._keeps.whole_logits else block.tp)
        return block.tokens * columns * block.itemsize

    def of(self, name: str) -> LayerBytes:
        """Return the memory of the layer of this name."""
        config, layers = self._config, self._layers
        if name not in (layers[0], layers[-1]):
            return self._block(int(name.rpartition(".")[2]))[1]
        model, (block, _) = config.model, self._block(0)
        if name == layers[-1]:
            chunk = config.train.loss_chunk_size if self._keeps.chunked_loss else 0
            if self._keeps.whole_logits:
                block = replace(block, tp=1, sequence_parallel=False)
            return head_layer(block, model.vocab_size, chunk)
        learned = model.position_embedding == "learned"
        positions = model.max_position_embeddings if learned else 0
        dropout = model.embedding_dropout if model.architecture == "gpt" else model.hidden_dropout
        return embedding_layer(block, model.vocab_size, positions, dropout > 0, self._device)

    def _block(self, layer: int) -> tuple[BlockSizes, LayerBytes]:
        model = self._config.model
        replayed = f"blocks.{layer}" in self._replayed
        key = model.has_experts(layer), model.window(layer), replayed
        if key not in self._blocks:
            sizes = block_sizes(self._config, self._device, layer)
            experts = None if sizes.experts is None else replace(sizes.experts, even=True)
            attention = self._keeps.attention(sizes.attention)
            sizes = replace(sizes, kernels=self._keeps.kernels, attention=attention, experts=experts)
            self._blocks[key] = sizes, block_layer(sizes, self._config.train.recompute if replayed else "none")
        return self._blocks[key]

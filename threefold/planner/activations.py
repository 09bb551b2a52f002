"""Activation memory of one layer for one micro-batch: the tensors that the forward pass keeps, and each pass's peaks.

After Korthikanti et al., "Reducing activation recomputation in large transformer models" (arXiv 2205.05198), section 4,
adapted to the layers of this package: dropout keeps its mask in the activations' dtype, and attention without dropout
keeps only its inputs, its output and one number per row where torch's fused kernel is used.

The moments follow the order in which autograd runs this package's layers (`models`, `parallel`). The first product of a
block's backward pass, for example, needs the gradients of the block's output and of the inner features in addition to
everything kept; a head needs its logits and their gradients. `stage_memory` puts the layers together.
`largest_micro_batch` chooses a default from the kept tensors alone.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from threefold.config import Config, resolve
from threefold.config.resolve import default_largest, on_device
from threefold.config.rules import default_micro_batches
from threefold.constants import LOGITS_AT_ONCE, LOGITS_OF_A_CHUNK
from threefold.planner.block import BlockShape, Latents, Mixture, further_blocks
from threefold.planner.model_size import ModelSize, ModelWeights
from threefold.planner.rank_block import RankBlock, built_in_attention, rank_block
from threefold.planner.systems import Keeps

_POSITION = 8
"""Bytes of a position index or a document number."""
_KEPT_BY_ACTIVATION = {"relu": 1, "quick_gelu": 3}
"""Inner feature tensors kept per activation function, including the next layer's input; the default is 2, the
function's input and output. The backward pass of ReLU needs only its output."""


def block_bytes(sizes: RankBlock, recompute: str = "none") -> int:
    """Return the bytes that a block, recomputed as given, keeps of a micro-batch between its forward and backward pass.

    Exact on a CPU for GPT in every layout and for Llama on one rank; an upper bound with experts, or for Llama's layers
    sharded over ranks. A GPU keeps the two numbers per token of each norm in fp32.
    """
    outer, kernels = sizes.outer, sizes.kernels
    if sizes.is_idle:
        return 0
    if recompute == "full":
        return outer
    inner = sizes.tokens * sizes.ffn // sizes.tp * sizes.itemsize
    if recompute == "selective" and kernels.replays_operations:
        # The block's input, and the outputs of attention and of every second matrix product.
        sums = sizes.samples * sizes.heads // sizes.tp * sizes.length // sizes.cp * sizes.wide
        return 2 * outer + sizes.queries + sizes.outputs + sums + sizes.keys + inner
    core = _core_bytes(sizes, recompute == "selective") if sizes.reaches("proj") else 0
    masks = 0
    if sizes.hidden_dropout:
        each = outer // sizes.itemsize * (kernels.mask_bytes or sizes.itemsize)
        masks = each * (sizes.reaches("mlp_norm") + (sizes.reaches("down") or sizes.trains("down")))
    if sizes.experts is not None:
        feed_forward = _experts_bytes(sizes, sizes.experts)
    else:
        feed_forward = _network_tensors(sizes) * inner
    # Of the two half blocks; a second norm of one keeps its input besides.
    norms = (("attn_norm", "qkv"), ("mlp_norm", "up"))[: sizes.norms]
    inputs = sum(_half_bytes(sizes, norm, product) for norm, product in norms) + max(2 - sizes.norms, 0) * outer
    inputs += max(sizes.norms - 2, 0) * (_norm_bytes(sizes) - outer)
    inputs += sizes.norms * sizes.hidden * sizes.wide if sizes.norm_offset else 0
    # Of attention, kept for their projection, and by fused attention.
    outputs = sizes.outputs if sizes.trains("proj") or (core and sizes.attention == "fused") else 0
    return inputs + core + outputs + feed_forward + masks + _adapter_bytes(sizes)


def _half_bytes(sizes: RankBlock, norm: str, product: str) -> int:
    """Return the bytes that a norm and the product after it keep, of trained weights or of a gradient that goes on."""
    on, trains = sizes.reaches(norm), sizes.trains(norm)
    reached = on or trains
    inputs = _norm_bytes(sizes, on, trains) - sizes.outer if reached else 0
    # Sequence parallelism gathers the output of the norm again in the backward pass, whether a product needs it or not.
    needed = sizes.trains(product) or (sizes.sequence_parallel and reached)
    return inputs + (sizes.outer if needed else 0)


def _network_tensors(sizes: RankBlock) -> int:
    """Return how many tensors of inner features a dense network keeps: before, within and after the activation."""
    needed, reached = int(sizes.trains("down")), sizes.reaches("down")
    if sizes.gated:  # around the activation function, and around the product with the gates
        return ((2 if sizes.kernels.fused_gate else 3) if reached else 0) + needed
    kept = _KEPT_BY_ACTIVATION.get(sizes.activation, 2)
    if kept == 1:  # the output, for the product and for the activation's own gradient
        return int(needed or reached)
    return (kept - 1 if reached else 0) + needed


def _adapter_bytes(sizes: RankBlock) -> int:
    """Return the bytes that adapters keep: what they multiply by B, and the B of several projections, with zeros."""
    found = 0
    for product, rows, parts in sizes.adapters:
        columns = sizes.product(product)[0]
        found += sizes.tokens * rows + (columns * (rows + parts) if parts else 0)
    return found * sizes.itemsize


def _norm_bytes(sizes: RankBlock, reached: bool = True, trains: bool = True) -> int:
    """Return the bytes of a norm's input and output, and of the numbers that it keeps for each token.

    RMSNorm step by step keeps the normalized input for its weight's gradient, and the rest for that of the input.
    """
    if sizes.rms:
        kept = _rms_bytes(sizes, sizes.local_tokens, sizes.outer)
        if not sizes.kernels.fused_norm and not (reached and trains):
            normalized = sizes.outer * sizes.wide // sizes.itemsize
            kept = normalized if trains else kept - normalized
        return kept + sizes.outer
    statistic = sizes.wide if sizes.kernels.wide_statistics else sizes.itemsize
    return 2 * sizes.outer + 2 * sizes.local_tokens * statistic


def _rms_bytes(sizes: RankBlock, rows: int, nbytes: int) -> int:
    """Return the bytes that RMSNorm keeps of an `nbytes` input, as `Kernels.fused_norm` describes."""
    if sizes.kernels.fused_norm:
        return nbytes + rows * sizes.wide
    return 2 * nbytes * sizes.wide // sizes.itemsize + rows * sizes.wide


def _core_bytes(sizes: RankBlock, replayed: bool) -> int:
    """Return the bytes that QK-norm, rotary embeddings and the attention core keep, if `replayed` only the core's
    inputs; its output is not included, since its projection keeps it."""
    cp, length, queries, kernels, latents = sizes.cp, sizes.length, sizes.queries, sizes.kernels, sizes.latents
    before = 2 * sizes.outputs if sizes.output_gate else 0  # the opened gates, and the output before them
    inputs = queries + sizes.keys + sizes.values  # of the core, and the tensors that they are views of
    if latents is not None:
        before += _latent_bytes(sizes, latents)
        inputs += sizes.keys * (sizes.head_dim - latents.rotary) // sizes.head_dim
    elif sizes.rotary and not kernels.fused_rotary:
        before += length // cp * sizes.head_dim * sizes.wide  # the table of angles
        inputs += queries + sizes.keys
    if sizes.qk_norm:
        before += _rms_bytes(sizes, sizes.tokens * (sizes.heads // sizes.tp), queries)
        before += _rms_bytes(sizes, sizes.tokens * sizes.local_key_heads, sizes.keys)
        if sizes.wide == sizes.itemsize:
            before -= sizes.keys  # a view of a tensor counted above
        before += queries if sizes.qk_norm_over_width else 0  # computed step by step
        before += 2 * sizes.head_dim * sizes.wide if sizes.norm_offset else 0
    if replayed:
        return before + inputs
    chunk = length // (2 * cp)
    keys = (2 * cp + 1) * chunk if cp > 1 else length  # seen by the two chunks of one context-parallel rank
    pairs = keys * chunk if cp > 1 else length**2  # query-key pairs
    heads = sizes.samples * sizes.heads // sizes.tp
    # Context parallelism keeps the gathered keys and values and the separate outputs of the two chunks.
    others = (cp if latents is None or sizes.ring else 0) * (sizes.keys + sizes.values)
    gathered = others + sizes.outputs if cp > 1 else 0
    bounds = _POSITION * sizes.samples * length if sizes.documents else 0
    if sizes.attention == "fused":
        sums = heads * length // cp * sizes.wide  # log-sum-exp of each query
        return before + inputs + sums + gathered + bounds
    if sizes.attention == "exact":  # keeps the weights as they were before dropout
        return before + inputs + gathered + bounds + heads * pairs * sizes.itemsize
    if sizes.attention == "dropped again":  # keeps the dropout key of each sample
        return before + inputs + gathered + bounds + _POSITION * sizes.samples
    if kernels.fused_softmax:
        each = sizes.itemsize if sizes.attention == "plain" else 2 * sizes.itemsize + kernels.mask_bytes
        return before + inputs + heads * pairs * each
    dense = queries + (queries + sizes.outputs) * keys * cp // length  # contiguous copies for the matrix products
    weights = heads * pairs * sizes.itemsize
    # Dropout keeps the weights before and after it and its mask; `pairs` is the causal mask.
    return before + dense + (weights if sizes.attention == "plain" else 3 * weights + pairs)


def _latent_bytes(sizes: RankBlock, latents: Latents) -> int:
    """Return the bytes that latent attention keeps of latents, their norms and the angles of rotation."""
    rows, item, kernels = sizes.local_tokens, sizes.itemsize, sizes.kernels
    found = sizes.key_tokens * latents.shared * item + _rms_bytes(sizes, rows, rows * latents.keys * item)
    if kernels.fused_norm or item == sizes.wide:  # the norm's input is a view of the rotating part too
        found += rows * latents.rotary * item
    if latents.queries:
        narrow = rows * latents.queries * item
        found += _rms_bytes(sizes, rows, narrow) + narrow
    if not kernels.fused_rotary:
        found += (sizes.tokens + rows) // sizes.samples * latents.rotary * sizes.wide
    return found


def _experts_bytes(sizes: RankBlock, experts: Mixture) -> int:
    tokens, item, wide = sizes.tokens, sizes.itemsize, sizes.wide
    chosen = tokens * experts.per_token
    routing = tokens * (experts.count + 1) * wide + chosen * (2 * 8 + 2 * wide)  # two integers per choice
    rows = 3 * chosen * sizes.hidden * item  # inputs of the experts, their outputs, and the weighted outputs
    inside = 4 * chosen * experts.inner // sizes.tp * item
    if sizes.ep > 1:
        # The all-to-all's output is kept too; with uneven routing a rank's experts may receive twice the mean.
        rows, inside = (4 * rows // 3, inside) if sizes.balanced else (3 * rows, 2 * inside)
    shared = 4 * tokens * experts.shared // sizes.tp * item + tokens * (sizes.hidden * item + wide)
    return routing + rows + inside + (shared if experts.shared else 0)


def head_bytes(sizes: RankBlock, vocab: int, chunk_size: int = 0, trains: bool = True, trains_norm: bool = True) -> int:
    """Return the bytes that the head, after such blocks, keeps of a micro-batch between its forward and backward pass.

    A frozen one (`trains` False) keeps no input of its product, unless this is gathered again or computed in chunks.

    Exact for the first tensor rank. Computing the loss briefly needs one or two chunks of logits on top or, with
    `chunk_size` 0 on a CPU, the gradients of all logits.
    """
    tokens, wide, norm, split = sizes.tokens, sizes.wide, _norm_bytes(sizes, trains=trains_norm), sizes.tp > 1
    if not (trains or chunk_size or sizes.kernels.loss_by_columns or sizes.sequence_parallel):
        norm -= sizes.outer
    labels = tokens * (8 + (2 if split else 0))
    columns = -(-vocab // sizes.tp)
    if chunk_size or sizes.kernels.loss_by_columns:
        # Largest logit and sum of exponentials; with tp also the factor to the common maximum.
        logits = 0 if chunk_size else columns * sizes.itemsize
        return norm + labels + tokens * (logits + (4 if split else 2) * wide + (0 if split else 1))
    if sizes.kernels.keeps_probabilities:
        # One number for the weight of all tokens together.
        return norm + labels + tokens * columns * wide + (0 if split else wide)
    # The largest logit and the sum of the exponentials; with tp also the label's logit.
    return norm + labels + tokens * (columns * sizes.itemsize + (3 if split else 2) * wide)


def further_bytes(sizes: RankBlock, vocab: int, chunk_size: int = 0, recompute: str = "none") -> int:
    """Return the bytes that multi-token prediction keeps for each further token, whose block has these sizes."""
    outer, kernels = sizes.outer, sizes.kernels
    looked_up = sizes.tokens * (8 + 1 if sizes.tp > 1 else 2 * 8)  # on one rank, a view of tokens and labels
    norms = 2 * (_norm_bytes(sizes) - outer)  # of the embeddings and the features, without their outputs
    if kernels.fused_norm or sizes.itemsize == sizes.wide:
        norms -= outer  # the features are the input of a loss too
    joined = 2 * outer
    return looked_up + norms + joined + block_bytes(sizes, recompute) + head_bytes(sizes, vocab, chunk_size)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer for one micro-batch.

    `kept` are those from the forward to the backward pass, `forward` and `backward` those in addition at the peak of
    each pass (before frees and without weight gradients), and `ending` those in addition to what earlier layers keep
    when the last weight gradients are computed. `largest` counts the elements of the weight whose gradient exists at
    the moment of `backward`. `deferred` are kept from the backward pass for inputs to the one for weights. `table`
    counts the elements of a weight with several uses in the layer, whose gradient is there until all have theirs.
    """

    kept: int
    forward: int
    backward: int
    ending: int
    largest: int
    deferred: int = 0
    table: int = 0


@lru_cache(maxsize=65536)
def block_layer(sizes: RankBlock, recompute: str) -> LayerBytes:
    """Return the memory of a transformer block, with the `train.recompute` that applies to it."""
    outer, kept, everything = sizes.outer, block_bytes(sizes, recompute), block_bytes(sizes)
    if sizes.is_idle:
        return LayerBytes(0, 0, 0, 0, 0)
    passing, largest, inner = _feed_forward(sizes)
    if "down" in sizes.frozen:  # of adapters, or none
        largest = max((rows * max(sizes.product(name)) for name, rows, _ in sizes.adapters), default=0)
    # A sequence-parallel rank gathers its output's gradient, and once more the feed-forward network's input.
    backward = outer + sizes.gathered + passing
    if recompute == "full":
        backward += everything - outer
    if recompute == "selective":
        # The recomputed core: the tensors it would otherwise keep and the gradients of unfused attention weights, minus
        # what the feed-forward network has freed.
        again = everything - kept
        again += again // 2 if sizes.attention != "fused" else 0
        backward = max(backward, again - 2 * inner + 2 * outer)
    # The products for queries, keys and values need their gradients, the layer's input and norm, and two input
    # gradients.
    queries = sizes.queries * (2 if sizes.output_gate else 1) + sizes.keys + sizes.values
    ending = 2 * queries + 3 * outer + sizes.gathered
    # inputs of the linear layers and gradients of their outputs
    of_product = {
        "qkv": sizes.whole + queries,
        "proj": sizes.whole + sizes.outputs,
        "up": sizes.whole + (2 if sizes.gated else 1) * inner,
        "down": sizes.whole + inner,
    }
    deferred = sum(nbytes for product, nbytes in of_product.items() if sizes.trains(product))
    deferred += 2 * sizes.tokens * sum(rows for _, rows, _ in sizes.adapters) * sizes.itemsize
    return LayerBytes(kept, 0, backward, ending, largest, deferred)


def _feed_forward(sizes: RankBlock) -> tuple[int, int, int]:
    """Return the peak of a feed-forward network's backward pass: bytes of activation gradients minus bytes freed,
    elements of weight gradients, and bytes of the inner features."""
    item, experts = sizes.itemsize, sizes.experts
    if experts is None:  # the weight-gradient product of its second layer
        inner = sizes.tokens * sizes.ffn // sizes.tp * item
        return inner, sizes.ffn // sizes.tp * sizes.hidden, inner
    rows = sizes.tokens * experts.per_token
    inner = rows * experts.inner // sizes.tp * item
    of_fullest = -(-experts.count // sizes.ep)  # experts on the rank that holds the most
    width = (1 if sizes.kernels.grouped else 2) * of_fullest * experts.inner // sizes.tp
    second = inner, width * sizes.hidden
    first = -rows * sizes.hidden * item - 2 * inner, 2 * width * sizes.hidden  # the first layer's, twice as wide
    passing, largest = max(first, second, key=lambda moment: moment[0] + item * moment[1])
    return passing, largest, inner


@lru_cache(maxsize=65536)
def head_layer(
    sizes: RankBlock, vocab: int, chunk_size: int, capped: bool = False, trains: bool = True, trains_norm: bool = True
) -> LayerBytes:
    """Return the memory of the final norm, the vocabulary projection and the loss; see `head_bytes`.

    While logits are `capped`, and while their gradients are, there is one more tensor of the logits at once.
    """
    columns, item, wide, whole = -(-vocab // sizes.tp), sizes.itemsize, sizes.wide, sizes.whole
    narrow, gathered = item < wide, sizes.gathered
    kept = head_bytes(sizes, vocab, chunk_size, trains, trains_norm)
    if chunk_size or sizes.kernels.loss_by_columns:
        logits = sizes.tokens * _columns_at_once(sizes.tokens, columns, chunk_size, sizes.kernels.loss_by_columns)
        run, again = _run_bytes(sizes, logits), 1 if chunk_size else 0
        forward = (again + capped) * logits * item + run + gathered
        backward = (1 + again + capped) * logits * item + (run if narrow else 0) + whole // item * wide + gathered
        return LayerBytes(kept, forward, backward, 3 * whole, columns * sizes.hidden if trains else 0)
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
    forward, backward = forward + capped * logits * item, backward + capped * logits * item
    return LayerBytes(kept, forward + gathered, backward + gathered, ending, 0, logits * item + whole)


def predicting_layer(
    head: LayerBytes, sizes: RankBlock, vocab: int, chunk_size: int, mode: str, depths: int
) -> LayerBytes:
    """Return the memory of a head with some further tokens, from that without them and the sizes of their blocks."""
    outer, table, block = sizes.outer, -(-vocab // sizes.tp) * sizes.hidden, block_layer(sizes, mode)
    # The backward pass begins with the last loss; when it comes to the last block, this loss's tensors are free.
    first, second = (head.backward, head.largest), (block.backward - head.kept + outer, block.largest + table)
    backward, largest = max(first, second, key=lambda moment: moment[0] + sizes.itemsize * moment[1])
    return LayerBytes(
        head.kept + depths * further_bytes(sizes, vocab, chunk_size, mode),
        head.forward,
        backward,
        head.ending,
        largest,
        head.deferred + depths * (head.deferred + block.deferred + 3 * outer),
        table,
    )


def _columns_at_once(tokens: int, columns: int, chunk_size: int, by_columns: bool) -> int:
    """Return how many columns of the logits the loss processes at a time (`Kernels.loss_by_columns`)."""
    unchunked = max(1, LOGITS_OF_A_CHUNK // tokens) if by_columns else columns
    return min(columns, chunk_size or unchunked)


def _run_bytes(sizes: RankBlock, logits: int) -> int:
    """Return the bytes of the wide copy of some rows of logits."""
    return sizes.wide * (logits if sizes.kernels.widens_logits else min(logits, LOGITS_AT_ONCE))


@lru_cache(maxsize=65536)
def embedding_layer(sizes: RankBlock, vocab: int, dropout: bool, device: str) -> LayerBytes:
    """Return the memory of the embeddings; their output counts as the first block's input."""
    outer, whole = sizes.outer, sizes.whole
    kept = sizes.tokens * (8 + (1 if sizes.tp > 1 else 0)) + (outer if dropout else 0)
    backward = outer + (whole if sizes.tp > 1 else 0)
    if device == "cpu" and sizes.itemsize < sizes.wide:  # a CPU accumulates a token's gradients in fp32
        backward += whole + sizes.tokens * sizes.hidden * sizes.wide
    return LayerBytes(kept, 0, backward, backward, -(-vocab // sizes.tp) * sizes.hidden)


class LayerMemory:
    """Memory of a model's layers on a rank for one micro-batch, of which those named in `replayed` are recomputed.

    `output` has the bytes of a block's output; `narrow_logits` those of the logits that are cast to fp32 for the loss,
    0 where none are.
    """

    def __init__(
        self, config: Config, device: str, keeps: Keeps, weights: ModelWeights, replayed: Collection[str]
    ) -> None:
        self._config, self._device, self._keeps = config, device, keeps
        self._layers, self._replayed, blocks = weights.plan.layers, replayed, weights.blocks
        self._embeds, self._of_head = weights.trains(self._layers[0]), weights.trains_head
        self._blocks = dict(zip(self._layers[1:-1], blocks, strict=True))
        self._of_blocks: dict[tuple[BlockShape, bool], LayerBytes] = {}
        self._further = further_blocks(weights.description)
        self._first = block = self._sizes(blocks[0])
        self.output = block.outer
        self._chunk_size = config.train.loss_chunk_size if keeps.system.chunked_loss else 0
        self.narrow_logits = 0
        if keeps.casts_logits and not self._chunk_size and block.itemsize < block.wide:
            columns = -(-config.model.vocab_size // (1 if keeps.system.whole_logits else block.tp))
            self.narrow_logits = block.tokens * columns * block.itemsize

    def of(self, name: str) -> LayerBytes:
        model, block = self._config.model, self._first
        if name == self._layers[0] and not self._embeds:
            return LayerBytes(0, 0, 0, 0, 0)
        if name == self._layers[0]:
            return embedding_layer(block, model.vocab_size, model.embedding_dropout > 0, self._device)
        if name == self._layers[-1]:
            if self._keeps.system.whole_logits:
                block = replace(block, tp=1, sequence_parallel=False)
            logits = model.vocab_size, self._chunk_size
            head = head_layer(block, *logits, model.logit_softcap > 0, *self._of_head)
            if not self._further:
                return head
            return predicting_layer(head, self._sizes(self._further[0]), *logits, self._mode(name), len(self._further))
        key = self._blocks[name], name in self._replayed
        if key not in self._of_blocks:
            self._of_blocks[key] = block_layer(self._sizes(self._blocks[name]), self._mode(name))
        return self._of_blocks[key]

    def _mode(self, name: str) -> str:
        return self._config.train.recompute if name in self._replayed else "none"

    def _sizes(self, block: BlockShape) -> RankBlock:
        attention = self._keeps.attention(built_in_attention(self._config, block, self._device))
        return rank_block(self._config, block, kernels=self._keeps.kernels, attention=attention, balanced=True)


_SCATTERED = {"cpu": 1.4, "cuda": 1.0}
"""Factor of activation memory over its bytes, as measured: the C library (`host`) keeps memory between tensors."""


def largest_micro_batch(config: Config, vocab_size: int, memory: int, device: str) -> int:
    """Return the largest default micro-batch whose step fits into a rank's memory, or the smallest if none does."""
    resolved = resolve(config, vocab_size)
    size = ModelSize(resolved)
    sizes = resolved.model.vocab_size, resolved.data.sequence_length, resolved.parallel
    largest = default_largest(*sizes, config.train.loss_chunk_size is not None, device)
    micro_batches = default_micro_batches(resolved)
    for micro_batch in (each for each in micro_batches if each <= largest):
        tried = on_device(resolve(config, vocab_size, largest_micro_batch=micro_batch), device)
        if step_bytes(tried, device, size) <= memory:
            return micro_batch
    return micro_batches[-1]


def step_bytes(config: Config, device: str, size: ModelSize | None = None) -> int:
    """Return the maximum number of bytes that any rank needs for a step, without communication buffers."""
    size, ranks = size or ModelSize(config), range(config.parallel.pp)
    activations = (int(_SCATTERED[device] * activation_bytes(config, device, size, rank)) for rank in ranks)
    return max(size.largest_rank(rank).bytes + nbytes for rank, nbytes in zip(ranks, activations, strict=True))


def activation_bytes(config: Config, device: str, size: ModelSize, pp_rank: int) -> int:
    """Return the peak bytes of a pipeline rank's kept activations and temporary buffers."""
    model, parallel, train, weights = config.model, config.parallel, config.train, size.weights
    replayed = weights.recomputed(train.recompute, train.recompute_every)
    layers, of_layer = weights.plan.layers, {}
    for name, described in zip(layers[1:-1], weights.blocks, strict=True):
        of_layer[name] = rank_block(config, described, attention=built_in_attention(config, described, device))
    first = of_layer[layers[1]]
    kept = moment = 0
    for name in size.layers_of_rank(pp_rank):
        block = of_layer.get(name, first)
        if name in of_layer:
            kept += block_bytes(block, train.recompute if name in replayed else "none")
            moment = max(moment, block_bytes(block))  # its gradients, or its recomputed activations
        elif name == layers[-1]:
            kept += block.outer + head_bytes(block, model.vocab_size, train.loss_chunk_size, *weights.trains_head)
            mode = train.recompute if name in replayed else "none"
            for described in further_blocks(weights.description):
                block = rank_block(config, described, attention=built_in_attention(config, described, device))
                kept += further_bytes(block, model.vocab_size, train.loss_chunk_size, mode)
                moment = max(moment, block_bytes(block))
            columns = -(-model.vocab_size // parallel.tp)
            at_once = _columns_at_once(block.tokens, columns, train.loss_chunk_size, device == "cuda")
            moment = max(moment, (3 if model.logit_softcap else 2) * block.tokens * at_once * block.wide)
        else:
            kept += block.tokens * 8 + block.outer * (2 if model.embedding_dropout else 1)
    return ceil(kept * _under_way(config, pp_rank)) + moment


def _under_way(config: Config, pp_rank: int) -> float:
    """Return the micro-batches that a rank keeps at once, including those with deferred weight gradients."""
    parallel, batches = config.parallel, config.train.gradient_accumulation_steps
    if parallel.pp == 1:
        return 1
    held = parallel.pipeline_schedule.in_flight(parallel.pp, pp_rank, parallel.stage_chunks)
    return batches if held is None else min(held, batches)

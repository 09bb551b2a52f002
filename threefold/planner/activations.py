"""Formulas for the activation memory that the forward pass keeps for the backward pass; `saved_tensors` measures it.

After Korthikanti et al., "Reducing activation recomputation in large transformer models" (arXiv 2205.05198), section 4,
adapted to the layers of this package: dropout keeps its mask in the activations' dtype, and attention without dropout
keeps only its inputs, its output and one number per row where torch's fused kernel serves.
"""

from dataclasses import dataclass
from typing import Final, Literal

from threefold.config import Config

Attention = Literal["fused", "plain", "dropped", "dropped again"]
"""Implementation of the attention core: a fused kernel (or tiles recomputed in the backward pass), plain matrix
products, plain products with dropout, or tiles with dropout that the backward pass recomputes."""
_POSITION = 8
"""Bytes of a position index or a document number."""
_KEPT_BY_ACTIVATION = {"relu": 1, "quick_gelu": 3}
"""Inner feature tensors kept per activation function, including the next layer's input; the default is 2, the
function's input and output. The backward pass of ReLU needs only its output."""


@dataclass(frozen=True)
class Kernels:
    """Choices of what kernels keep for the backward pass, where training systems and devices differ.

    Attributes:
        fused_norm: whether RMSNorm keeps its input and a number per row; otherwise input and normalised input, in at
            least fp32, and the number.
        fused_gate: whether a gated network keeps only the gates and the values they gate; otherwise SiLU's output too.
        fused_rotary: whether rotated queries and keys replace the unrotated ones; otherwise both are kept.
        fused_softmax: whether unfused attention keeps only its weights before and after dropout and the mask, without
            copies of queries, keys and values (Megatron-LM).
        mask_bytes: bytes per element of a dropout mask; 0 for the activations' itemsize.
        replays_operations: whether `selective` recompute keeps the outputs of attention and of every second matrix
            product and recomputes everything else (torchtitan), not only the attention core.
        wide_statistics: whether norms keep their per-row numbers in fp32 whatever dtype they compute in.
        grouped: whether one kernel computes all experts, with one weight gradient; otherwise separate ones are joined.
        keeps_probabilities: whether the loss keeps probabilities in at least fp32; otherwise logits and two numbers per
            token.
        widens_logits: whether the loss widens all logits of the current chunk at once; otherwise a few rows at a time.
        gradients_in_place: whether weight-gradient products accumulate directly into the fp32 gradients.
    """

    fused_norm: bool = False
    fused_gate: bool = False
    fused_rotary: bool = False
    fused_softmax: bool = False
    mask_bytes: int = 0
    replays_operations: bool = False
    wide_statistics: bool = False
    grouped: bool = False
    keeps_probabilities: bool = False
    widens_logits: bool = False
    gradients_in_place: bool = False


@dataclass(frozen=True)
class ExpertSizes:
    """Mixture of experts that replaces a block's feed-forward network.

    Attributes:
        count, per_token: experts of the layer, and of these, experts that each token is routed to.
        inner, shared: inner features of one expert, before `tp` divides them, and of the shared expert; 0 for none.
        spread: whether experts are sharded over ranks, so that a rank may receive more tokens than it sends.
        held: experts on one rank; 0 for all.
        even: whether routing is balanced; otherwise a rank's experts are chosen up to twice as often as the mean.
    """

    count: int
    per_token: int
    inner: int
    shared: int = 0
    spread: bool = False
    held: int = 0
    even: bool = False


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of one transformer block as sharded on one rank.

    Attributes:
        samples, positions: micro-batch size B, and sequence length S.
        hidden, heads, ffn: sizes of the whole model; `tp` divides `heads` and `ffn`.
        itemsize: bytes per activation element.
        hidden_dropout: whether the block's two outputs have dropout.
        attention: implementation of the attention core.
        tp, cp: tensor-parallel ranks, which share heads and features; context-parallel ranks, which share positions.
        sequence_parallel: whether activations between the tensor-parallel layers are sharded along the sequence.
        head_dim, key_heads: features per head, and key and value heads; 0 for `hidden` / `heads`, and for `heads`.
        activation: activation function of a feed-forward network that is not gated.
        llama: whether the block uses RMSNorm and a gated feed-forward network.
        rotary, head_norms: whether the block has rotary embeddings, and QK-norm.
        documents: whether attention stops at document boundaries.
        experts: mixture of experts in place of the feed-forward network.
        kernels: what the kernels keep; by default those of this package on a CPU.
    """

    samples: int
    positions: int
    hidden: int
    heads: int
    ffn: int
    itemsize: int = 4
    hidden_dropout: bool = False
    attention: Attention = "fused"
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    head_dim: int = 0
    key_heads: int = 0
    rotary: bool = False
    activation: str = "gelu_tanh"
    llama: bool = False
    head_norms: bool = False
    documents: bool = False
    experts: ExpertSizes | None = None
    kernels: Kernels = Kernels()

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on a rank."""
        return self.samples * self.positions // self.cp

    @property
    def own_tokens(self) -> int:
        """Tokens that the rank holds between the tensor-parallel layers."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def wide(self) -> int:
        """Bytes per element of tensors computed in at least fp32."""
        return max(4, self.itemsize)

    @property
    def queries(self) -> int:
        """Bytes of the rank's queries."""
        return self.tokens * (self.head_dim or self.hidden // self.heads) * self.heads // self.tp * self.itemsize

    @property
    def keys(self) -> int:
        """Bytes of the rank's keys, before GQA expands them; also those of its values."""
        whole = self.tokens * (self.head_dim or self.hidden // self.heads) * self.itemsize
        return whole * self.own_key_heads

    @property
    def own_key_heads(self) -> int:
        """Key and value heads on the rank; at least one, which several ranks may share."""
        return max(1, (self.key_heads or self.heads) // self.tp)


def block_bytes(sizes: BlockSizes, recompute: str = "none") -> int:
    """Return the bytes that one block keeps of one micro-batch between its forward and backward pass.

    Exact on a CPU for GPT in every layout and for Llama on one rank; an upper bound with experts, or for Llama's layers
    sharded over ranks. A GPU keeps the two numbers per token of each norm in fp32.

    Args:
        sizes: sizes of the block on the rank.
        recompute: `train.recompute`, for a block that it applies to.
    """
    outer = sizes.own_tokens * sizes.hidden * sizes.itemsize
    if recompute == "full":
        return outer
    if recompute == "selective" and sizes.kernels.replays_operations:
        return _kept_between_operations(sizes, outer)
    # Input and output of a LayerNorm, and the mean and deviation of each token.
    norm = 2 * outer + 2 * sizes.own_tokens * _statistic(sizes)
    if sizes.llama:
        norm = _rms_bytes(sizes, sizes.own_tokens, outer) + outer
    core = _kept_for_core(sizes, recompute == "selective")
    masks = 2 * outer // sizes.itemsize * (sizes.kernels.mask_bytes or sizes.itemsize) if sizes.hidden_dropout else 0
    feed_forward = _feed_forward_bytes(sizes) if sizes.experts is None else _experts_bytes(sizes, sizes.experts)
    # queries: the attention output, kept for its projection
    return 2 * norm + core + sizes.queries + feed_forward + masks


def _statistic(sizes: BlockSizes) -> int:
    """Return the bytes of one per-token number that LayerNorm keeps."""
    return sizes.wide if sizes.kernels.wide_statistics else sizes.itemsize


def _kept_between_operations(sizes: BlockSizes, outer: int) -> int:
    """Return the bytes of the block's input and the outputs of attention and of every second matrix product."""
    sums = sizes.samples * sizes.heads // sizes.tp * sizes.positions // sizes.cp * sizes.wide
    inner = sizes.tokens * sizes.ffn // sizes.tp * sizes.itemsize
    return 2 * outer + 2 * sizes.queries + sums + sizes.keys + inner


def _rms_bytes(sizes: BlockSizes, rows: int, nbytes: int) -> int:
    """Return the bytes that RMSNorm keeps of an `nbytes` input, as `Kernels.fused_norm` describes."""
    if sizes.kernels.fused_norm:
        return nbytes + rows * sizes.wide
    return 2 * nbytes * sizes.wide // sizes.itemsize + rows * sizes.wide


def _kept_for_core(sizes: BlockSizes, replayed: bool) -> int:
    """Return the bytes kept up to the attention core's output, by QK-norm, rotary embeddings and the core itself."""
    heads, key_heads = sizes.heads // sizes.tp, sizes.own_key_heads
    split = sizes.queries + 2 * sizes.keys  # queries, keys and values as their projection returns them
    inputs, before = split, 0
    if sizes.rotary and not sizes.kernels.fused_rotary:
        tables = sizes.positions // sizes.cp * (sizes.head_dim or sizes.hidden // sizes.heads) * sizes.wide
        before += tables
        inputs += sizes.queries + sizes.keys
    if sizes.head_norms:
        before += _rms_bytes(sizes, sizes.tokens * heads, sizes.queries)
        before += _rms_bytes(sizes, sizes.tokens * key_heads, sizes.keys)
        if sizes.wide == sizes.itemsize:
            before -= sizes.keys  # a view of a tensor counted above
    if replayed:
        return before + inputs
    return before + _core_bytes(sizes, inputs)


def _core_bytes(sizes: BlockSizes, inputs: int) -> int:
    """Return the bytes that the attention core keeps, without its output, which its projection keeps; `inputs` counts
    its inputs and the tensors that they are views of."""
    cp, length, queries = sizes.cp, sizes.positions, sizes.queries
    chunk = length // (2 * cp)
    keys = (2 * cp + 1) * chunk if cp > 1 else length  # seen by the two chunks of one context-parallel rank
    pairs = keys * chunk if cp > 1 else length**2  # query-key pairs
    heads = sizes.samples * sizes.heads // sizes.tp
    # Context parallelism keeps the gathered keys and values and the separate outputs of the two chunks.
    gathered = 2 * cp * sizes.keys + queries if cp > 1 else 0
    bounds = _POSITION * sizes.samples * length if sizes.documents else 0
    if sizes.attention == "fused":
        sums = heads * length // cp * sizes.wide  # log-sum-exp of each query
        return inputs + sums + gathered + bounds
    if sizes.attention == "dropped again":
        return inputs + gathered + bounds + _POSITION * sizes.samples  # plus the dropout key of each sample
    if sizes.kernels.fused_softmax:
        each = sizes.itemsize if sizes.attention == "plain" else 2 * sizes.itemsize + sizes.kernels.mask_bytes
        return inputs + heads * pairs * each
    dense = queries + 2 * queries * keys * cp // length  # contiguous copies for the matrix products
    weights = heads * pairs * sizes.itemsize
    # Dropout keeps the weights before and after it and its mask; `pairs` is the causal mask.
    return dense + (weights if sizes.attention == "plain" else 3 * weights + pairs)


def _feed_forward_bytes(sizes: BlockSizes) -> int:
    """Return the bytes kept around the activation function, and in a gated network around the product with the
    gates."""
    count = (3 if sizes.kernels.fused_gate else 4) if sizes.llama else _KEPT_BY_ACTIVATION.get(sizes.activation, 2)
    return count * sizes.tokens * sizes.ffn // sizes.tp * sizes.itemsize


def _experts_bytes(sizes: BlockSizes, experts: ExpertSizes) -> int:
    tokens, item, wide = sizes.tokens, sizes.itemsize, sizes.wide
    chosen = tokens * experts.per_token
    routing = tokens * (experts.count + 1) * wide + chosen * (2 * 8 + 2 * wide)  # two integers per choice
    rows = 3 * chosen * sizes.hidden * item  # inputs of the experts, their outputs, and the weighted outputs
    inside = 4 * chosen * experts.inner // sizes.tp * item
    if experts.spread:
        # The all-to-all's output is kept too; with uneven routing a rank's experts may receive twice the mean.
        rows, inside = (4 * rows // 3, inside) if experts.even else (3 * rows, 2 * inside)
    shared = 4 * tokens * experts.shared // sizes.tp * item + tokens * (sizes.hidden * item + wide)
    return routing + rows + inside + (shared if experts.shared else 0)


def head_bytes(sizes: BlockSizes, vocab: int, chunk_size: int = 0) -> int:
    """Return the bytes that the head keeps of one micro-batch between its forward and backward pass.

    Exact for the first tensor rank. Computing the loss briefly needs one or two chunks of logits on top or, with
    `chunk_size` 0, the gradients of all logits.

    Args:
        sizes: sizes of the blocks before the head; their heads and features are ignored.
        vocab: vocabulary size of the whole model.
        chunk_size: `train.loss_chunk_size`.
    """
    tokens, own, wide = sizes.tokens, sizes.own_tokens, sizes.wide
    outer = own * sizes.hidden * sizes.itemsize
    norm = _rms_bytes(sizes, own, outer) + outer if sizes.llama else 2 * outer + 2 * own * _statistic(sizes)
    split = sizes.tp > 1
    labels = tokens * (8 + (2 if split else 0))
    if chunk_size:  # largest logit and sum of exponentials; with tp also the factor to the common maximum
        return norm + labels + tokens * ((4 if split else 2) * wide + (0 if split else 1))
    columns = -(-vocab // sizes.tp)
    if sizes.kernels.keeps_probabilities:
        # One number for the weight of all tokens together.
        return norm + labels + tokens * columns * wide + (0 if split else wide)
    # The largest logit and the sum of the exponentials; with tp also the label's logit.
    return norm + labels + tokens * (columns * sizes.itemsize + (3 if split else 2) * wide)


_LONGEST_PLAIN: Final = 512
"""Longest sequence for which bf16 attention on a CPU (see `kernels`), and attention with dropout, keeps its weights."""


def block_sizes(config: Config, device: str, layer: int) -> BlockSizes:
    """Return the sizes of a block on one rank, as the formulas of this module take them.

    Args:
        config: resolved config of the run.
        device: `cpu` or `cuda`.
        layer: index of the block.
    """
    model, parallel, data = config.model, config.parallel, config.data
    llama, itemsize = model.architecture == "llama", config.precision.itemsize
    attention: Attention = "fused"
    tiled = data.separate_documents or 0 < model.window(layer) < data.sequence_length
    short = not tiled and data.sequence_length <= _LONGEST_PLAIN
    if model.attention_dropout:
        attention = "dropped" if short else "dropped again"
    elif device == "cpu" and config.precision.dtype == "bf16" and short:
        attention = "plain"
    experts = None
    if model.has_experts(layer):
        shared = model.shared_expert_ffn_hidden_size
        inner = model.expert_ffn_hidden_size
        experts = ExpertSizes(
            model.num_experts,
            model.experts_per_token,
            inner,
            shared,
            parallel.ep > 1,
            -(-model.num_experts // parallel.ep),
        )
    return BlockSizes(
        samples=config.train.micro_batch_size,
        positions=data.sequence_length,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        ffn=model.ffn_hidden_size,
        itemsize=itemsize,
        hidden_dropout=model.hidden_dropout > 0,
        attention=attention,
        tp=parallel.tp,
        cp=parallel.cp,
        sequence_parallel=parallel.sequence_parallel,
        head_dim=model.head_dim if llama else 0,
        key_heads=model.num_key_value_heads if llama else 0,
        rotary=model.position_embedding == "rope",
        activation=model.activation,
        llama=llama,
        head_norms=model.qk_norm,
        documents=data.separate_documents,
        experts=experts,
    )

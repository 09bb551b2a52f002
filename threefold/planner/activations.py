"""Activation memory that the forward pass keeps for the backward pass, by formula; `saved_tensors` counts it.

After Korthikanti et al., "Reducing activation recomputation in large transformer models" (arXiv 2205.05198), section 4,
for the layers of this package: dropout keeps its mask in the activations' dtype, and attention without dropout keeps
only its inputs, its output and one number per row where torch's fused kernel serves.
"""

from dataclasses import dataclass
from typing import Final, Literal

from threefold.config import Config

Attention = Literal["fused", "plain", "dropped", "dropped again"]
"""How the attention core computes: a fused kernel, or tiles that the backward pass computes again; plain products;
plain products with dropout; or those in tiles, which the backward pass computes and drops again."""
_POSITION = 8
"""Bytes of a position in a sequence, or the number of a document."""
_KEPT_BY_ACTIVATION = {"relu": 1, "quick_gelu": 3}
"""Tensors of the inner features that are kept, the input of the next layer among them; others keep 2, the first layer's
output and the function of it. ReLU's backward pass needs its result alone."""


@dataclass(frozen=True)
class Kernels:
    """What kernels keep for the backward pass, where systems and devices differ.

    Attributes:
        fused_norm: whether a norm of the root mean square keeps its input and a number for each row, as one kernel
            does; otherwise it keeps its input and the normalised one, in fp32 at least.
        fused_gate: whether SiLU and product of a gated network keep the gates and what they gate alone; otherwise
            SiLU's result too.
        fused_rotary: whether turned queries and keys replace those before; otherwise both are kept.
        fused_softmax: whether attention that is not fused keeps, of its weights, those before dropout, those after it
            and the mask alone, without copies of queries, keys and values (Megatron-LM).
        mask_bytes: of an element of a dropout mask; 0 for that of the activations.
        replays_operations: whether `selective` recompute keeps the results of every second product and of attention
            and computes all else again (torchtitan), not only the attention core.
        wide_statistics: whether norms keep their numbers for each row in fp32 whatever they compute in.
        grouped: whether one kernel computes the products of all experts, and the gradient of their weights as one
            tensor; otherwise each has a gradient of its own before they are joined.
        keeps_probabilities: whether the loss keeps probabilities of all logits, in fp32 at least; otherwise the logits
            as they are and two numbers for each token.
        widens_logits: whether the loss makes a wide copy of all logits at hand at once; otherwise of some rows.
        gradients_in_place: whether products for weights add to the fp32 gradients themselves, so that there is no
            gradient of a weight beside the sum.
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
    """The experts in the place of a block's feed-forward network.

    Attributes:
        count: how many there are.
        per_token: how many each token is sent to.
        inner: the features inside each; `tp` divides it.
        shared: the features inside the one that every token goes through; 0 for none.
        spread: whether they are sharded over ranks; a rank may then receive more tokens than it sends.
        held: how many of them a rank has; 0 for all.
        even: whether each is chosen as often as every other; otherwise those of a rank up to twice as often.
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
    """One transformer block, as sharded on a rank.

    Attributes:
        samples: B of a micro-batch.
        positions: S of a sequence.
        hidden, heads, ffn: whole sizes; `tp` divides `heads` and `ffn`.
        itemsize: bytes of an activation's element.
        hidden_dropout: whether the block's two outputs have dropout.
        attention: how its core computes.
        tp: ranks that share heads and features.
        cp: ranks that share the positions.
        sequence_parallel: whether activations between the split layers are sharded along the sequence.
        head_dim: of each head; 0 for `hidden` / `heads`.
        key_heads: heads of keys and values; 0 for `heads`.
        rotary: whether positions are rotary.
        activation: of a feed-forward network that is not gated.
        llama: whether norms are of the root mean square, and the feed-forward network is gated.
        head_norms: whether there is QK-norm.
        documents: whether attention stops at the bounds of documents.
        experts: in the place of the feed-forward network.
        kernels: what they keep; of this package on a CPU by default.
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
        """Of a micro-batch on a rank."""
        return self.samples * self.positions // self.cp

    @property
    def own_tokens(self) -> int:
        """Of them, those that the rank has between the split layers."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def wide(self) -> int:
        """Bytes of an element of what is computed in fp32 at least."""
        return max(4, self.itemsize)

    @property
    def queries(self) -> int:
        """Bytes of the rank's queries."""
        return self.tokens * (self.head_dim or self.hidden // self.heads) * self.heads // self.tp * self.itemsize

    @property
    def keys(self) -> int:
        """Bytes of the rank's keys, before they serve several heads, and of its values."""
        whole = self.tokens * (self.head_dim or self.hidden // self.heads) * self.itemsize
        return whole * self.own_key_heads

    @property
    def own_key_heads(self) -> int:
        """The rank's heads of keys and values; one where it shares one with others."""
        return max(1, (self.key_heads or self.heads) // self.tp)


def block_bytes(sizes: BlockSizes, recompute: str = "none") -> int:
    """Bytes that one block keeps of one micro-batch between its forward and its backward pass.

    Exact on a CPU, for GPT in every layout and for Llama on one rank; with experts or Llama's layers spread over ranks,
    no less than is kept. A GPU keeps the two numbers per token of each norm in fp32.

    Args:
        sizes: of the block.
        recompute: as `train.recompute`, for a block that it treats.
    """
    outer = sizes.own_tokens * sizes.hidden * sizes.itemsize
    if recompute == "full":
        return outer
    if recompute == "selective" and sizes.kernels.replays_operations:
        return _kept_between_operations(sizes, outer)
    # Input and output of a norm, mean and deviation of each token.
    norm = 2 * outer + 2 * sizes.own_tokens * _statistic(sizes)
    if sizes.llama:
        norm = _rms_bytes(sizes, sizes.own_tokens, outer) + outer
    core = _kept_for_core(sizes, recompute == "selective")
    masks = 2 * outer // sizes.itemsize * (sizes.kernels.mask_bytes or sizes.itemsize) if sizes.hidden_dropout else 0
    feed_forward = _feed_forward_bytes(sizes) if sizes.experts is None else _experts_bytes(sizes, sizes.experts)
    return 2 * norm + core + sizes.queries + feed_forward + masks  # queries: what attention hands to its projection


def _statistic(sizes: BlockSizes) -> int:
    """Bytes of a number that a layer norm keeps for a token."""
    return sizes.wide if sizes.kernels.wide_statistics else sizes.itemsize


def _kept_between_operations(sizes: BlockSizes, outer: int) -> int:
    """The block's input, and the results of attention and of every second product: of those for queries, values, the
    first of the feed-forward network and its last."""
    sums = sizes.samples * sizes.heads // sizes.tp * sizes.positions // sizes.cp * sizes.wide
    inner = sizes.tokens * sizes.ffn // sizes.tp * sizes.itemsize
    return 2 * outer + 2 * sizes.queries + sums + sizes.keys + inner


def _rms_bytes(sizes: BlockSizes, rows: int, nbytes: int) -> int:
    """What a norm of the root mean square keeps of an input of `nbytes`: itself and the normalised one, in fp32 at
    least, and a number for each row."""
    if sizes.kernels.fused_norm:
        return nbytes + rows * sizes.wide
    return 2 * nbytes * sizes.wide // sizes.itemsize + rows * sizes.wide


def _kept_for_core(sizes: BlockSizes, replayed: bool) -> int:
    """What is kept up to the output of the attention core: by norms of heads and turned positions, and by the core."""
    heads, key_heads = sizes.heads // sizes.tp, sizes.own_key_heads
    split = sizes.queries + 2 * sizes.keys  # queries, keys and values, as the layer before gives them
    inputs, before = split, 0
    if sizes.rotary and not sizes.kernels.fused_rotary:
        tables = sizes.positions // sizes.cp * (sizes.head_dim or sizes.hidden // sizes.heads) * sizes.wide
        before += tables
        inputs += sizes.queries + sizes.keys
    if sizes.head_norms:
        before += _rms_bytes(sizes, sizes.tokens * heads, sizes.queries)
        before += _rms_bytes(sizes, sizes.tokens * key_heads, sizes.keys)
        if sizes.wide == sizes.itemsize:
            before -= sizes.keys  # a view of what is kept already
    if replayed:
        return before + inputs
    return before + _core_bytes(sizes, inputs)


def _core_bytes(sizes: BlockSizes, inputs: int) -> int:
    """What the attention core keeps, its inputs included; its output is kept by the projection after it.

    Args:
        sizes: of the block.
        inputs: bytes of its inputs, and of what they are views of.
    """
    cp, length, queries = sizes.cp, sizes.positions, sizes.queries
    chunk = length // (2 * cp)
    keys = (2 * cp + 1) * chunk if cp > 1 else length  # seen by the two chunks of a context rank together
    pairs = keys * chunk if cp > 1 else length**2  # of query and key
    heads = sizes.samples * sizes.heads // sizes.tp
    # With a context axis the gathered keys and values, and the two chunks' own outputs.
    gathered = 2 * cp * sizes.keys + queries if cp > 1 else 0
    bounds = _POSITION * sizes.samples * length if sizes.documents else 0
    if sizes.attention == "fused":
        sums = heads * length // cp * sizes.wide  # the logarithm of each query's sum
        return inputs + sums + gathered + bounds
    if sizes.attention == "dropped again":
        return inputs + gathered + bounds + _POSITION * sizes.samples  # with the key of each sample
    if sizes.kernels.fused_softmax:
        each = sizes.itemsize if sizes.attention == "plain" else 2 * sizes.itemsize + sizes.kernels.mask_bytes
        return inputs + heads * pairs * each
    dense = queries + 2 * queries * keys * cp // length  # copies, as a matrix product needs them
    weights = heads * pairs * sizes.itemsize
    # Dropped from: the weights before and after, the mask, and which keys come later.
    return dense + (weights if sizes.attention == "plain" else 3 * weights + pairs)


def _feed_forward_bytes(sizes: BlockSizes) -> int:
    """Before and after the activation function; of a gated network gates and what they gate, the gates' SiLU and the
    product."""
    count = (3 if sizes.kernels.fused_gate else 4) if sizes.llama else _KEPT_BY_ACTIVATION.get(sizes.activation, 2)
    return count * sizes.tokens * sizes.ffn // sizes.tp * sizes.itemsize


def _experts_bytes(sizes: BlockSizes, experts: ExpertSizes) -> int:
    tokens, item, wide = sizes.tokens, sizes.itemsize, sizes.wide
    chosen = tokens * experts.per_token
    routing = tokens * (experts.count + 1) * wide + chosen * (2 * 8 + 2 * wide)  # two integers for each choice
    rows = 3 * chosen * sizes.hidden * item  # what goes to the experts, what they answer, and that weighted
    inside = 4 * chosen * experts.inner // sizes.tp * item
    if experts.spread:
        # What comes back by all-to-all is kept too; or the experts of a rank are chosen more often than others.
        rows, inside = (4 * rows // 3, inside) if experts.even else (3 * rows, 2 * inside)
    shared = 4 * tokens * experts.shared // sizes.tp * item + tokens * (sizes.hidden * item + wide)
    return routing + rows + inside + (shared if experts.shared else 0)


def head_bytes(sizes: BlockSizes, vocab: int, chunk_size: int = 0) -> int:
    """Bytes that the head keeps of one micro-batch between its forward and its backward pass.

    Exact for the first tensor rank. While it computes the loss it has, for a moment, one or two chunks of its logits
    beside that, or with `chunk_size` 0 their gradients.

    Args:
        sizes: of the blocks before it, whose heads and features do not matter.
        vocab: whole size of the vocabulary.
        chunk_size: as `train.loss_chunk_size`.
    """
    tokens, own, wide = sizes.tokens, sizes.own_tokens, sizes.wide
    outer = own * sizes.hidden * sizes.itemsize
    norm = _rms_bytes(sizes, own, outer) + outer if sizes.llama else 2 * outer + 2 * own * _statistic(sizes)
    split = sizes.tp > 1
    labels = tokens * (8 + (2 if split else 0))
    if chunk_size:  # the largest logit and the sum of the exponentials; with tp the factor to the common maximum too
        return norm + labels + tokens * ((4 if split else 2) * wide + (0 if split else 1))
    columns = -(-vocab // sizes.tp)
    if sizes.kernels.keeps_probabilities:
        # One number for the weight of all tokens together.
        return norm + labels + tokens * columns * wide + (0 if split else wide)
    # The largest logit and the sum of the exponentials; with tp the label's logit beside the sum.
    return norm + labels + tokens * (columns * sizes.itemsize + (3 if split else 2) * wide)


_LONGEST_PLAIN: Final = 512
"""Tokens up to which bf16 attention on a CPU keeps its weights (`kernels`), and attention with dropout does."""


def block_sizes(config: Config, device: str, layer: int) -> BlockSizes:
    """A rank's sizes of a block, for the formulas of `plan.activations`.

    Args:
        config: resolved.
        device: `cpu` or `cuda`.
        layer: number of the block.
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

"""Linear layers, embeddings, attention masks and activation functions, by torch's kernels; faster on a CPU with a room.

The attached room `cpu` knows when oneDNN, which torch includes, has the faster products, and when plain products are
faster than fused attention (hooks `onednn_serves`, `plain_attention_serves`).
"""

from collections.abc import Callable
from functools import partial
from math import pi, sqrt
from typing import Any, Final, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from threefold.doors import hook
from threefold.torch_private.runtime import Handle, operator
from threefold.torch_private.tensors import onednn_linear

_onednn_serves: Final[Callable[[Tensor, Tensor], bool]] = hook("onednn_serves") or (lambda x, weight: False)
plain_attention_serves: Final[Callable[[Tensor], bool]] = hook("plain_attention_serves") or (lambda k: False)


class GradientStore(Protocol):
    """Store of deferred weight gradients; while `is_open` is False, the backward pass computes them as usual."""

    is_open: bool

    def defer(self, leaf: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Add `gradient()` to the gradient of `leaf` later."""


class DeferrableWeight(nn.Parameter):
    """Weight in the memory of `data` whose gradients the layers below defer to a store while it is open."""

    store: GradientStore
    handle: Handle

    def __new__(cls, data: Tensor, store: GradientStore) -> "DeferrableWeight":
        weight: DeferrableWeight = super().__new__(cls, data)
        weight.store, weight.handle = store, Handle(ref(weight))
        return weight


def gradient_store(weight: Tensor) -> GradientStore | None:
    """Return the open store that a weight's gradients are deferred to; None if the backward pass computes them."""
    store: GradientStore | None = getattr(weight, "store", None)  # also for a fake tensor, which keeps its attributes
    return store if store is not None and store.is_open else None


def defer_or_compute(
    store: GradientStore | None, leaf: Tensor, wanted: bool, gradient: Callable[[], Tensor]
) -> Tensor | None:
    """Return `gradient()`, or None if it is not wanted or if it is deferred to a store for `leaf`."""
    if not wanted:
        return None
    if store is None:
        return gradient()
    store.defer(leaf, gradient)
    return None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear`: `x` [..., in], `weight` [out, in], `bias` [out] → [..., out].

    If `weight` is a `DeferrableWeight` whose store is open, the backward pass only computes the gradient of `x`, and
    defers those of `weight` and `bias` to the store.
    """
    store = gradient_store(weight)
    if torch.compiler.is_compiling():
        if store is not None and x.requires_grad:
            assert isinstance(weight, DeferrableWeight)  # only these have a store
            to_bias = bias.handle if isinstance(bias, DeferrableWeight) else None  # a frozen bias has none
            return _CompiledDeferredLinear.apply(x, weight, bias, weight.handle, to_bias)
        # On a CPU the compiler's own products may be slower.
        built_in, store = x.device.type == "cpu" and not torch.is_autocast_enabled("cpu"), None
    else:
        built_in = store is not None or _onednn_serves(x, weight)
    return LinearFunction.apply(x, weight, bias, store, product) if built_in else F.linear(x, weight, bias)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Compute `F.embedding`: rows of `table` [V, H] at int64 `ids` [...] → [..., H]."""
    if table.device.type == "cpu" and table.itemsize < 4:
        return _WideEmbedding.apply(ids, table)
    return F.embedding(ids, table)


class AttentionMask(NamedTuple):
    """Attention mask in addition to the causal one: a sliding window and documents."""

    window: int = 0  # positions, including its own, that a token attends to; 0 for all
    documents: Tensor | None = None  # int64 [B, n], of each position from the first; on the host, as in `SampleInfo`

    def within(self, keys: int) -> "AttentionMask":
        """Return the mask for a sequence of `keys` positions, without the window if it covers all of them."""
        return AttentionMask(self.window if self.window < keys else 0, self.documents)


class Scoring(NamedTuple):
    """How products of queries and keys become attention weights: a factor, a soft cap before the mask, and sinks."""

    scale: float | None = None  # None for head_dim^-0.5
    softcap: float = 0.0  # c of c · tanh(score / c), as in Gemma 2; 0 for none
    sinks: Tensor | None = None  # [heads], each like the score of one key more, whose value is 0, as in gpt-oss

    @property
    def is_fused(self) -> bool:
        """Whether fused kernels compute attention with it."""
        return not self.softcap and self.sinks is None

    def factor(self, width: int) -> float:
        """Return the factor of the products of heads of this width."""
        return width**-0.5 if self.scale is None else self.scale


PLAIN_SCORING: Final = Scoring()


def attention_weights(q: Tensor, k: Tensor, hidden: Tensor, scoring: Scoring = PLAIN_SCORING) -> Tensor:
    """Return attention weights [B, heads, Q, K] of `q` [B, heads, Q, d] and `k` [B, heads, K, d], by plain operations.

    `hidden` is True where a query does not see a key, and has a shape that can be expanded to that of the weights.
    """
    found = q * scoring.factor(q.shape[-1]) @ k.mT
    if scoring.softcap:
        found = softcap(found, scoring.softcap)
    return with_sinks(found.masked_fill(hidden, -torch.inf), scoring.sinks).softmax(-1)[..., : k.shape[2]]


def with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Append the sink of each head to its scores [B, heads, Q, K], if there are any: [B, heads, Q, K + 1]."""
    if sinks is None:
        return scores
    return torch.cat([scores, sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attend from the last Q of K positions to all positions up to their own, as `ops.attention.attention` does."""
    if plain_attention_serves(k):
        (batch, queries, heads, width), keys = q.shape, k.shape[1]
        k, v = serve_heads(k, heads), serve_heads(v, heads)
        q, k, v = (each.transpose(1, 2).reshape(batch * heads, -1, each.shape[-1]) for each in (q, k, v))
        bias = torch.full((queries, keys), -torch.inf, dtype=q.dtype).triu_(1 + keys - queries)
        out = torch.baddbmm(bias, q, k.mT, alpha=Scoring(scale).factor(width)).softmax(-1) @ v
        return out.view(batch, heads, queries, -1).transpose(1, 2).flatten(2)
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if q.shape[2] == k.shape[2]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    else:  # torch's own causal mask would align the first query with the first key
        mask = causal_lower_right(q.shape[2], k.shape[2])  # the fused kernels of a GPU do not materialize it
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2)


def serve_heads(x: Tensor, heads: int, dim: int = 2) -> Tensor:
    """Repeat each head of keys or values along `dim` for its group of query heads, `heads` in total (GQA)."""
    served = heads // x.shape[dim]
    return x if served == 1 else x.repeat_interleave(served, dim)


def later(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return bool [queries, keys]: whether a key comes after each of the last `queries` positions."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1 + keys - queries)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear(a, b, bias)` of matrices or transposed views, in the fastest way; not differentiable."""
    if torch.compiler.is_compiling():
        return _product(a, b, bias) if a.device.type == "cpu" else F.linear(a, b, bias)
    if not _onednn_serves(a, b):
        return F.linear(a, b, bias)
    # oneDNN takes transposed views of `b` as they are, but has only its slow reference for rows with gaps between them;
    # it would copy a view of `a` unseen by anything that counts memory.
    dense = b if b.is_contiguous() or b.t().is_contiguous() else b.contiguous()
    return onednn_linear(a.contiguous(), dense, bias)


@operator("product", lambda a, b, bias: a.new_empty(a.shape[0], b.shape[0]))
def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return product(a, b, bias)


class _WideEmbedding(torch.autograd.Function):
    """Lookup whose gradient is accumulated in fp32 and rounded once.

    On a CPU, torch accumulates it in the table's dtype: in bf16, the sum for a frequent token stops growing at 256
    times a single gradient.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype = table.shape, table.dtype
        return F.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        used, place = ids.flatten().unique(return_inverse=True)
        sums = torch.zeros(len(used), ctx.shape[1], dtype=torch.float32)
        sums.index_add_(0, place, grad.reshape(-1, ctx.shape[1]).float())
        return None, torch.zeros(ctx.shape, dtype=ctx.dtype).index_copy_(0, used, sums.to(ctx.dtype))


class LinearFunction(torch.autograd.Function):
    """`F.linear` by products `multiply`, with a weight's gradient by `product`; deferred to a store if there is one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        store: GradientStore | None,
        multiply: Callable[..., Tensor],
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(flat if weight.requires_grad else None, weight)  # a frozen weight needs no input
        ctx.multiply = multiply
        # A saved tensor may come back as another one (recomputation detaches it); the store needs the leaf itself.
        ctx.store, ctx.leaves = store, (None, None) if store is None else (weight, bias)
        return multiply(flat, weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1])  # -1 is ambiguous without features
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        leaf, bias = ctx.leaves
        return (
            ctx.multiply(flat, weight.t()).view(*grad.shape[:-1], weight.shape[1]) if wants_x else None,
            defer_or_compute(ctx.store, leaf, wants_weight, lambda: product(flat.t(), x.t())),
            defer_or_compute(ctx.store, bias, wants_bias, partial(flat.sum, 0)),
            None,
            None,
        )


class _CompiledDeferredLinear(torch.autograd.Function):
    """`LinearFunction` with a store, for compiled code: an operator finds the store through the weights' handles."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, to_weight: Handle, to_bias: Handle | None
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(flat, weight)
        ctx.to_weight, ctx.to_bias = to_weight, to_bias
        return product(flat, weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1])
        has_bias = ctx.to_bias is not None
        grad_x = _defer(flat, x, weight, ctx.to_weight, ctx.to_bias if has_bias else ctx.to_weight, has_bias)
        return grad_x.view(*grad.shape[:-1], weight.shape[1]), None, None, None, None


@operator("defer", lambda grad, x, weight, *_: grad.new_empty(grad.shape[0], weight.shape[1]))
def _defer(grad: Tensor, x: Tensor, weight: Tensor, to_weight: Handle, to_bias: Handle, has_bias: bool) -> Tensor:
    """Return the gradient of a linear layer's input [rows, in], and defer those of weight and bias.

    The deferred products keep the arguments, so compiled code must not reuse their memory (`compile_layers`).
    """
    weight_leaf, bias_leaf = to_weight.value(), to_bias.value()
    weight_leaf.store.defer(weight_leaf, partial(product, grad.t(), x.t()))
    if has_bias:
        bias_leaf.store.defer(bias_leaf, partial(grad.sum, 0))
    return product(grad, weight.t())


_LINEAR: Final = 2 * sqrt(2 / pi)
_CUBIC: Final = 0.044715 * _LINEAR


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute `F.gelu(x, approximate="tanh")`, as x · σ(2u) in compiled code: 1 + tanh(u) = 2 · σ(2u)."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    # On a CPU, compiled code computes σ in less than half the time of tanh.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.sigmoid(wide * (_LINEAR + _CUBIC * wide * wide))).to(x.dtype)


def quick_gelu(x: Tensor) -> Tensor:
    """Compute x · σ(1.702 · x), the sigmoid approximation of GELU (Hendrycks and Gimpel, arXiv 1606.08415)."""
    return x * torch.sigmoid(1.702 * x)


def gated(pairs: Tensor, activation: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    """Compute activation(gate) · up of features that alternate between gates and ups: [..., 2F] → [..., F]."""
    packs = torch.compiler.is_compiling() and pairs.is_cuda and pairs.dtype == torch.bfloat16 and pairs.is_contiguous()
    if packs and activation is F.silu:
        return _PackedGated.apply(pairs)
    gate, up = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    return activation(gate) * up


def limited_gated(pairs: Tensor, limit: float) -> Tensor:
    """Compute (up + 1) · quick_gelu(gate) of gates up to `limit` and ups within ±`limit`, as in gpt-oss."""
    return _LimitedGated.apply(pairs, limit)


class _LimitedGated(torch.autograd.Function):
    """Keeps nothing but its input, unlike autograd's."""

    @staticmethod
    def forward(ctx: Any, pairs: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(pairs)
        ctx.limit = limit
        gate, up = pairs.unflatten(-1, (-1, 2)).unbind(-1)
        return (up.clamp(-limit, limit) + 1) * quick_gelu(gate.clamp(max=limit))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (pairs,), limit = ctx.saved_tensors, ctx.limit
        gate, up = pairs.unflatten(-1, (-1, 2)).unbind(-1)
        below, within = gate <= limit, up.abs() <= limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        open_ = torch.sigmoid(1.702 * gate)
        to_gate = grad * (up + 1) * open_ * (1 + 1.702 * gate * (1 - open_)) * below
        return torch.stack([to_gate, grad * gate * open_ * within], -1).flatten(-2), None


class _PackedGated(torch.autograd.Function):
    """`gated` for compiled code on a GPU, which reads and writes pairs of bf16 as words of 32 bits.

    A gate is the lower half of a word, and bf16 is the upper half of fp32. Read one by one, numbers two apart take half
    of the memory's rate.
    """

    @staticmethod
    def forward(ctx: Any, pairs: Tensor) -> Tensor:
        ctx.save_for_backward(pairs)
        gate, up = _unpacked(pairs)
        return (gate * torch.sigmoid(gate) * up).to(torch.bfloat16)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (pairs,) = ctx.saved_tensors
        (gate, up), wide = _unpacked(pairs), grad.float()
        open_ = torch.sigmoid(gate)
        lower, upper = (
            each.to(torch.bfloat16).view(torch.int16).to(torch.int32)
            for each in (wide * up * open_ * (1 + gate * (1 - open_)), wide * gate * open_)
        )
        return ((lower & 0xFFFF) | (upper << 16)).view(torch.bfloat16)


def _unpacked(pairs: Tensor) -> tuple[Tensor, Tensor]:
    words = pairs.view(torch.int32)
    return (words << 16).view(torch.float32), (words & -(1 << 16)).view(torch.float32)


def softcap(x: Tensor, cap: float) -> Tensor:
    """Compute cap · tanh(x / cap), elementwise; for the backward pass it keeps the result alone."""
    return _Softcap.apply(x, cap)


class _Softcap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        out = (x / cap).tanh_().mul_(cap)
        ctx.save_for_backward(out)
        ctx.cap = cap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        return grad * softcap_slope(out, ctx.cap), None


def softcap_slope(out: Tensor, cap: float) -> Tensor:
    """Return the derivative of `softcap` where its result is `out`."""
    # Elementary operations one by one have the same bits in tensors of every size (`exact.layers`).
    return 1 - (out / cap).square()


def squared_relu(x: Tensor) -> Tensor:
    """Return relu(x)², as in So et al., "Primer" (arXiv 2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu_tanh": gelu_tanh,
    "gelu": F.gelu,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": squared_relu,
    "silu": F.silu,
}
"""Activation functions by their names in `model.activation`."""

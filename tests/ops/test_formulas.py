"""Kernels and layers against their formulas written out, values and gradients, with incoming gradients that are random:
a factor that is lost, or a part that has no gradient, shows.

In fp64 to 1e-12. In bf16 against the formula in fp64 of the same bf16 numbers, to a few roundings of 2⁻⁸.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import pi, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ops.attention import numbered
from tests.support.compiled import traced
from tests.support.sweep import sweep
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.constants import IGNORE_INDEX
from threefold.cpu.tiles import plain_tile, plain_tile_gradients
from threefold.models.layers.attention import CausalAttention, Rotary
from threefold.models.layers.decoder import Embedding, Head, Linear, PositionEmbedding, SampleInfo
from threefold.models.layers.experts import MixtureOfExperts, SwiGLU, grouped_linear
from threefold.models.layers.rope_scaling import RopeScaling
from threefold.models.llama import LlamaConfig
from threefold.ops.attention import attention
from threefold.ops.cross_entropy import chunked_cross_entropy, cross_entropy
from threefold.ops.kernels import ACTIVATIONS, AttentionMask, embedding, linear
from threefold.parallel.cross_entropy import ParallelCrossEntropy
from threefold.random.dropout import sample_keys
from threefold.verify.worker_pool import WorkerPool

LIMIT = {torch.float64: 1e-12, torch.bfloat16: 5 * 2.0**-8}
DTYPES = pytest.mark.parametrize("dtype", LIMIT, ids=str)


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def check(
    compute: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    given: Sequence[Tensor],
    dtype: torch.dtype = torch.float64,
    limit: float | None = None,
) -> None:
    """The result and the gradients of all that is given, relative to the largest of each."""
    found = []
    for function, kind in ((compute, dtype), (formula, torch.float64)):
        inputs = [each.to(dtype).to(kind).requires_grad_() for each in given]
        out = function(*inputs)
        grad = drawn(*out.shape, seed=7).to(dtype).to(out.dtype)
        found.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
    for place, (ours, exact) in enumerate(zip(*found, strict=True)):
        assert exact.abs().max() > 1e-3, f"nothing to compare at {place}"
        error = (ours.double() - exact).abs().max() / exact.abs().max()
        assert error <= (limit or LIMIT[dtype]), f"relative error {error:.3g} at {place}"


def softmax(scores: Tensor) -> Tensor:
    exponents = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return exponents / exponents.sum(-1, keepdim=True)


def attends(queries: int, keys: int, window: int, documents: Tensor | None, row: int) -> Tensor:
    """bool [queries, keys] of a sample, by what attention to a window and inside documents means."""
    allowed = torch.zeros(queries, keys, dtype=torch.bool)
    for query in range(queries):
        place = keys - queries + query
        for key in range(place + 1):
            near = not window or place - key < window
            together = documents is None or bool(documents[row, key] == documents[row, place])
            allowed[query, key] = near and together
    return allowed


def attention_formula(
    window: int, documents: Tensor | None, mask: Callable[[int, int, Tensor], Tensor] | None = None
) -> Callable[..., Tensor]:
    """Sample by sample and head by head.

    Args:
        window, documents: what hides keys.
        mask: (sample, head, weights [Q, K]) → what dropout leaves of them.
    """

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = []
        for row in range(len(q)):
            allowed = attends(q.shape[1], k.shape[1], window, documents, row)
            heads = []
            for head in range(q.shape[2]):
                of_keys = head // (q.shape[2] // k.shape[2])
                scores = q[row, :, head] @ k[row, :, of_keys].T / sqrt(q.shape[3])
                weights = softmax(scores.masked_fill(~allowed, -torch.inf))
                weights = weights if mask is None else mask(row, head, weights)
                heads.append(weights @ v[row, :, of_keys])
            rows.append(torch.cat(heads, -1))
        return torch.stack(rows)

    return formula


@DTYPES
@pytest.mark.parametrize(("window", "kind"), [(0, "none"), (5, "none"), (0, "many"), (7, "many"), (0, "apart")])
@pytest.mark.parametrize(("queries", "keys"), [(33, 33), (10, 33)])
def test_attention(queries: int, keys: int, window: int, kind: str, dtype: torch.dtype) -> None:
    documents = numbered(kind, 2, keys)
    given = [drawn(2, n, heads, 6, seed=seed) for n, heads, seed in ((queries, 4, 1), (keys, 2, 2), (keys, 2, 3))]
    check(
        lambda *each: attention(*each, AttentionMask(window, documents)),
        attention_formula(window, documents),
        given,
        dtype,
    )


@pytest.mark.parametrize(("window", "kind"), [(0, "none"), (5, "none"), (0, "many")])
def test_attention_with_dropout(window: int, kind: str) -> None:
    """With its weights kept, and drawn again tile by tile."""
    length, documents = 29, numbered(kind, 2, 29)
    core = CausalAttention(0.3, window, "blocks.0.attn.core")
    samples = SampleInfo(sample_keys(1, 2, torch.arange(2)), documents)
    factors = core.dropout(torch.ones(2, 4, length, length, dtype=torch.float64), samples.keys)
    given = [drawn(2, length, heads, 6, seed=seed) for heads, seed in ((4, 1), (2, 2), (2, 3))]
    formula = attention_formula(window, documents, lambda row, head, weights: weights * factors[row, head])
    check(lambda *each: core(*each, samples), formula, given)


@DTYPES
@pytest.mark.parametrize("drops", [False, True])
def test_plain_tile(drops: bool, dtype: torch.dtype) -> None:
    """Its gradients, which nothing but tiles calls, too."""
    factors = (drawn(2, 4, 9, 13) > -0.5).double() * 1.5
    bias = torch.zeros(9, 13).masked_fill(torch.ones(9, 13).triu(5).bool(), -torch.inf)
    drop = (lambda x: x * factors.to(x.dtype)) if drops else None

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        weights = softmax(q @ k.mT / sqrt(6) + bias)
        return (weights * factors if drops else weights) @ v

    given = [drawn(2, heads, n, 6, seed=seed) for heads, n, seed in ((4, 9, 1), (2, 13, 2), (2, 13, 3))]
    given = [each.to(dtype).double().requires_grad_() for each in given]
    narrow = [each.detach().to(dtype) for each in given]
    upper = drawn(2, 4, 9, 6, seed=5).to(dtype)
    out = formula(*given)
    exact = [out, *torch.autograd.grad(out, given, upper.double())]
    ours = [
        plain_tile(*narrow, bias.to(dtype), drop=drop),
        *plain_tile_gradients(upper, *narrow, bias.to(dtype), drop=drop)[0],
    ]
    for mine, right in zip(ours, exact, strict=True):
        assert (mine.double() - right).abs().max() / right.abs().max() <= LIMIT[dtype]


def losses_formula(labels: Tensor) -> Callable[[Tensor], Tensor]:
    def formula(logits: Tensor) -> Tensor:
        losses = []
        for row, label in zip(logits, labels.tolist(), strict=True):
            top = row.detach().max()
            losses.append(row.sum() * 0 if label == IGNORE_INDEX else (row - top).exp().sum().log() + top - row[label])
        return torch.stack(losses)

    return formula


LABELS = torch.tensor([3, 0, IGNORE_INDEX, 16, 7, IGNORE_INDEX, 16, 1])
VOCAB = 17


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_cross_entropy(scale: float, dtype: torch.dtype) -> None:
    logits = drawn(len(LABELS), VOCAB, scale=scale)
    check(lambda x: cross_entropy(x, LABELS), losses_formula(LABELS), [logits], dtype)


@DTYPES
@pytest.mark.parametrize("chunk", [1, 5, 17, 40])
def test_chunked_cross_entropy(chunk: int, dtype: torch.dtype) -> None:
    given = [drawn(len(LABELS), 12), drawn(VOCAB, 12)]
    # A chunk's logits are rounded to bf16, those about 5 to 2⁻⁶, before anything is computed of them.
    limit = None if dtype == torch.float64 else 4 * 2.0**-6
    check(
        lambda x, weight: chunked_cross_entropy(x, weight, LABELS, chunk),
        lambda x, weight: losses_formula(LABELS)(x @ weight.T),
        given,
        dtype,
        limit,
    )


@pytest.mark.parametrize("chunk", [0, 5])
def test_the_head(chunk: int) -> None:
    """Norm, product and the sum of the losses."""
    norm, labels = nn.LayerNorm(12, eps=1e-3).double(), LABELS.view(2, 4)
    head = Head(norm, 12, VOCAB).double()
    head.loss.chunk_size = chunk

    def compute(x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        given = {"output.weight": weight, "norm.weight": gain, "norm.bias": shift}
        return torch.func.functional_call(head, given, (x, labels)).view(1)  # type: ignore[no-any-return]

    def formula(x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        logits = layer_norm(1e-3)(x, gain, shift) @ weight.T
        return losses_formula(LABELS)(logits.flatten(0, 1)).sum().view(1)

    check(compute, formula, [drawn(2, 4, 12), drawn(VOCAB, 12), 1 + drawn(12), drawn(12, seed=1)])


def of_shards(tp: int, chunk: int) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Losses, and gradients of the input and of this rank's rows of the weight, with a vocabulary in shards."""
    mesh = Mesh(Layout(tp=tp), torch.device("cpu"))
    loss = ParallelCrossEntropy(VOCAB, mesh.tp)
    x = drawn(len(LABELS), 12).requires_grad_()
    weight = drawn(VOCAB, 12)[loss.start : loss.end].clone().requires_grad_()
    losses = loss.chunked(x, weight, LABELS, chunk) if chunk else loss(x @ weight.T, LABELS)
    losses.backward(drawn(len(LABELS), seed=7))
    return losses.detach(), x.grad, weight.grad, loss.start, loss.end  # type: ignore[return-value]


@sweep("tp", [2, 3, 5], quick=(1,))
@pytest.mark.parametrize("chunk", [0, 4])
def test_cross_entropy_of_a_vocabulary_in_shards(pool: WorkerPool, tp: int, chunk: int) -> None:
    x, weight = drawn(len(LABELS), 12).requires_grad_(), drawn(VOCAB, 12).requires_grad_()
    expected = losses_formula(LABELS)(x @ weight.T)
    expected.backward(drawn(len(LABELS), seed=7))
    assert x.grad is not None
    assert weight.grad is not None
    ranks = pool.run(tp, of_shards, tp, chunk)
    torch.testing.assert_close(sum(rank[1] for rank in ranks), x.grad, rtol=1e-12, atol=1e-12)
    for losses, _, part, start, end in ranks:
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(part, weight.grad[start:end], rtol=1e-12, atol=1e-12)
    assert [rank[4] for rank in ranks[:-1]] == [rank[3] for rank in ranks[1:]]


def layer_norm(eps: float) -> Callable[..., Tensor]:
    def formula(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
        variance = (centred * centred).sum(-1, keepdim=True) / x.shape[-1]
        return centred / (variance + eps).sqrt() * gain + shift

    return formula


def rms_norm(eps: float) -> Callable[..., Tensor]:
    def formula(x: Tensor, gain: Tensor) -> Tensor:
        return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * gain

    return formula


@DTYPES
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_norms(eps: float, dtype: torch.dtype) -> None:
    """Those that the families are made of."""
    x, gain, shift = drawn(3, 5, 8), 1 + drawn(8), drawn(8, seed=1)
    for module, formula, given in (
        (nn.LayerNorm(8, eps), layer_norm(eps), {"weight": gain, "bias": shift}),
        (nn.RMSNorm(8, eps), rms_norm(eps), {"weight": gain}),
    ):

        def compute(x: Tensor, *rest: Tensor, module: nn.Module = module, names: Any = tuple(given)) -> Tensor:
            return torch.func.functional_call(module, dict(zip(names, rest, strict=True)), (x,))  # type: ignore

        check(compute, formula, [x, *given.values()], dtype)


ACTIVATION_FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: x / 2 * (1 + (sqrt(2 / pi) * (x + 0.044715 * x**3)).tanh()),
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / sqrt(2))),
    "quick_gelu": lambda x: x / (1 + (-1.702 * x).exp()),
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x * x * (x > 0),
    "silu": lambda x: x / (1 + (-x).exp()),
}


@DTYPES
@pytest.mark.parametrize("name", ACTIVATION_FORMULAS)
def test_activations(name: str, dtype: torch.dtype) -> None:
    assert ACTIVATION_FORMULAS.keys() == ACTIVATIONS.keys()
    check(ACTIVATIONS[name], ACTIVATION_FORMULAS[name], [drawn(9, 7, scale=2.0)], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTIVATION_FORMULAS)
def test_compiled_activations(name: str) -> None:
    compiled = torch.compile(lambda x: ACTIVATIONS[name](x), fullgraph=True)
    check(lambda x: traced(compiled, x), ACTIVATION_FORMULAS[name], [drawn(9, 7, scale=2.0)])


def with_weights(module: nn.Module, *rest: Any) -> tuple[Callable[..., Tensor], list[str]]:
    """The module as a function of its input and its weights."""
    names = [name for name, _ in module.named_parameters()]

    def compute(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x, *rest))  # type: ignore

    return compute, names


def silu_gated(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = x @ gate_up[0::2].T, x @ gate_up[1::2].T
    return gate / (1 + (-gate).exp()) * up @ down.T


@DTYPES
def test_swiglu(dtype: torch.dtype) -> None:
    compute, names = with_weights(SwiGLU(8, 11))
    assert names == ["gate_up.weight", "down.weight"]
    check(compute, silu_gated, [drawn(2, 5, 8), drawn(22, 8, scale=0.4), drawn(8, 11)], dtype)


def test_mixture_of_experts() -> None:
    """Token by token, expert by expert; the gradient of the router through the weights of the outputs alone."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 6, "expert_ffn_hidden_size": 6}
    config = LlamaConfig(num_experts=4, shared_expert_ffn_hidden_size=5, shared_expert_gate=True, **sizes)
    compute, names = with_weights(MixtureOfExperts(config))
    order = ["router.weight", "experts.gate_up", "experts.down", "shared.gate_up.weight", "shared.down.weight"]
    assert names == [*order, "shared_gate.weight"]

    def formula(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, *shared: Tensor) -> Tensor:
        rows = []
        for token in x.flatten(0, 1):
            probabilities = softmax(router @ token)
            chosen = sorted(range(4), key=lambda expert: -probabilities[expert].item())[:2]
            total = sum(probabilities[expert] for expert in chosen)
            out = sum(probabilities[e] / total * silu_gated(token, gate_up[e], down[e]) for e in chosen)
            rows.append(out + silu_gated(token, *shared[:2]) / (1 + (-token @ shared[2].T).exp()))
        return torch.stack(rows).view(x.shape)

    shapes = [(2, 7, 8), (4, 8), (4, 12, 8), (4, 8, 6), (10, 8), (8, 5), (1, 8)]
    check(compute, formula, [drawn(*shape, seed=place) for place, shape in enumerate(shapes)])


@pytest.mark.parametrize("scaling", [RopeScaling(), RopeScaling("linear", 3.0), RopeScaling(attention_factor=1.4)])
def test_rotary(scaling: RopeScaling) -> None:
    """Pairs as complex numbers, turned by their angle: of queries and keys at once, so that neither can be left out."""
    rotary = Rotary(6, 20.0, scaling)

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., :3], x[..., 3:])
        places = torch.arange(x.shape[1], dtype=torch.float64).view(1, -1, 1, 1) / scaling.factor
        angles = places * torch.tensor([20.0 ** (-2 * pair / 6) for pair in range(3)], dtype=torch.float64)
        out = pairs * torch.polar(torch.full_like(angles, scaling.attention_factor), angles)
        return torch.cat([out.real, out.imag], -1)

    def both(turn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda q, k: torch.cat(turn(q, k), 2)

    given = [drawn(2, 9, 4, 6), drawn(2, 9, 2, 6)]
    check(both(rotary), both(lambda q, k: (turned(q), turned(k))), given)


@DTYPES
def test_linear_layers(dtype: torch.dtype) -> None:
    x, weight, bias = drawn(2, 5, 6), drawn(7, 6), drawn(7)
    check(linear, lambda x, weight, bias: x @ weight.T + bias, [x, weight, bias], dtype)
    compute, _ = with_weights(Linear(6, 7))
    check(compute, lambda x, weight, bias: x @ weight.T + bias, [x, weight, bias], dtype)
    counts = torch.tensor([3, 0, 4, 2])
    bounds = [0, *accumulate(counts.tolist())]

    def groups(rows: Tensor, stack: Tensor) -> Tensor:
        return torch.cat([rows[bounds[e] : bounds[e + 1]] @ stack[e].T for e in range(4)])

    check(lambda rows, stack: grouped_linear(rows, stack, counts), groups, [drawn(9, 6), drawn(4, 7, 6)], dtype)


@DTYPES
def test_embeddings(dtype: torch.dtype) -> None:
    """Rows that occur often, once and never."""
    ids = torch.tensor([[1, 4, 4, 1], [0, 1, 4, 4]])
    chosen = torch.eye(6, dtype=torch.float64)[ids]
    check(lambda table: embedding(ids, table), lambda table: chosen @ table, [drawn(6, 5)], dtype)
    layer = Embedding(6, 5)
    check(
        lambda table: torch.func.functional_call(layer, {"weight": table}, (ids,)),  # type: ignore[arg-type]
        lambda table: chosen @ table,
        [drawn(6, 5)],
        dtype,
    )
    places = PositionEmbedding(6, 5)
    for samples, formula in (
        (SampleInfo(), lambda table: table[:4]),
        (SampleInfo(positions=ids), lambda table: chosen @ table),
    ):

        def compute(table: Tensor, samples: SampleInfo = samples) -> Tensor:
            return torch.func.functional_call(places, {"weight": table}, (torch.zeros(2, 4, 5), samples))  # type: ignore

        check(compute, formula, [drawn(6, 5)], dtype)


def test_gradients_by_differences() -> None:
    """Against no formula at all, where that is cheap."""
    q, k, v = (drawn(1, 4, heads, 2, seed=heads).requires_grad_() for heads in (2, 1, 1))
    documents = torch.tensor([[0, 0, 1, 1]])
    assert torch.autograd.gradcheck(lambda *each: attention(*each, AttentionMask(0, documents)), (q, k, v))
    assert torch.autograd.gradcheck(lambda *each: attention(*each, AttentionMask(2)), (q, k, v))
    core, keys = CausalAttention(0.4, 3, "blocks.0.attn.core"), SampleInfo(sample_keys(0, 0, torch.tensor([5])))
    assert torch.autograd.gradcheck(lambda *each: core(*each, keys), (q, k, v))
    logits, x, weight = (drawn(*shape).requires_grad_() for shape in ((8, 17), (8, 3), (17, 3)))
    assert torch.autograd.gradcheck(lambda each: cross_entropy(each, LABELS), (logits,))
    assert torch.autograd.gradcheck(lambda *each: chunked_cross_entropy(*each, LABELS, 5), (x, weight))

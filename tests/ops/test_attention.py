"""Attention tile by tile against its definition; and that neither its memory nor its work grows with S²."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.attention import masked_attention, numbered
from tests.support.compiled import operators_of
from tests.support.saved_tensors import recording_saved
from threefold.cpu import tiles as module
from threefold.cpu.tiles import TileGradients, tile_inputs
from threefold.ops.attention import attention
from threefold.ops.kernels import PLAIN_SCORING, AttentionMask, Scoring
from threefold.torch_private.fake import OperationMode, fake_tensors, tree_leaves

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2}


def inputs(
    rows: int,
    queries: int,
    keys: int,
    heads: tuple[int, int] = (4, 2),
    width: int = 6,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    draw = torch.Generator().manual_seed(queries + keys)
    sizes = ((queries, heads[0]), (keys, heads[1]), (keys, heads[1]))
    return [torch.randn(rows, *size, 6, generator=draw).to(dtype).requires_grad_() for size in sizes]


def with_gradients(compute: Callable[..., Tensor], given: list[Tensor], *rest: Any) -> list[Tensor]:
    """The result, and the gradients of what is given."""
    given = [each.detach().clone().requires_grad_() for each in given]
    out = compute(*given, *rest)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    out.backward(grad.to(given[0].dtype).to(out.dtype))
    assert all(each.grad is not None and each.grad.dtype == each.dtype for each in given)
    return [out, *(each.grad for each in given if each.grad is not None)]


def check(given: list[Tensor], window: int, documents: Tensor | None, scoring: Scoring = PLAIN_SCORING) -> None:
    found = with_gradients(attention, given, AttentionMask(window, documents), scoring)
    expected = with_gradients(masked_attention, given, window, documents, scoring)
    assert found[0].dtype == given[0].dtype
    for ours, theirs in zip(found, expected, strict=True):
        # A gradient may be 0 but for rounding: that of the scores of a single key.
        scale = theirs.double().abs().max().clamp_min(0.1)
        assert (ours.double() - theirs.double()).abs().max() / scale <= TOLERANCE[given[0].dtype]


@pytest.mark.parametrize("kind", ["none", "one", "single tokens", "few", "many", "apart"])
@pytest.mark.parametrize("window", [0, 1, 7, 150, 1000])
@pytest.mark.parametrize(("rows", "queries", "keys"), [(2, 301, 301), (3, 70, 301), (1, 5, 5)], ids=str)
def test_windows_and_documents(rows: int, queries: int, keys: int, window: int, kind: str) -> None:
    check(inputs(rows, queries, keys, dtype=torch.float64), window, numbered(kind, rows, keys))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("window", "kind"), [(0, "none"), (9, "none"), (0, "few"), (600, "none"), (20, "many")])
@pytest.mark.parametrize("heads", [(3, 3), (4, 1)], ids=str)
def test_dtypes(dtype: torch.dtype, window: int, kind: str, heads: tuple[int, int]) -> None:
    """bf16 by plain products and, for the keys of a long tile, by the fused kernel."""
    for queries in (700, 130):
        check(inputs(2, queries, 700, heads, dtype=dtype), window, numbered(kind, 2, 700))


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 7), (4, 8), (5, 17), (3, 600)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_last_positions(dtype: torch.dtype, queries: int, keys: int) -> None:
    check(inputs(2, queries, keys, (3, 3), dtype=dtype), 0, None)


def check_sinks(given: list[Tensor], window: int, documents: Tensor | None, softcap: float = 0.0) -> None:
    """Compare the result and all gradients, of the sinks too."""
    sinks = torch.linspace(-1.5, 2.5, given[0].shape[2]).to(given[0].dtype)
    mask = AttentionMask(window, documents)
    found = with_gradients(lambda q, k, v, s: attention(q, k, v, mask, Scoring(0.6, softcap, s)), [*given, sinks])
    expected = with_gradients(
        lambda q, k, v, s: masked_attention(q, k, v, window, documents, Scoring(0.6, softcap, s)), [*given, sinks]
    )
    for ours, theirs in zip(found, expected, strict=True):
        scale = theirs.double().abs().max().clamp_min(0.1)
        assert (ours.double() - theirs.double()).abs().max() / scale <= TOLERANCE[given[0].dtype]


@pytest.mark.parametrize("kind", ["none", "few", "apart"])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize(("queries", "keys"), [(301, 301), (70, 301)], ids=str)
def test_sinks(queries: int, keys: int, softcap: float, window: int, kind: str) -> None:
    """Their gradient too, with the one that torch computes for the definition."""
    check_sinks(inputs(2, queries, keys, dtype=torch.float64), window, numbered(kind, 2, keys), softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 550])
def test_sinks_in_narrow_dtypes(dtype: torch.dtype, length: int) -> None:
    for softcap in (0.0, 1.5):
        check_sinks(inputs(2, length, length, dtype=dtype), 0, None, softcap)


SCORES = {"scale": Scoring(0.7), "softcap": Scoring(softcap=1.5), "both": Scoring(0.7, 0.9)}


@pytest.mark.parametrize("kind", ["none", "few"])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize(("queries", "keys"), [(301, 301), (70, 301)], ids=str)
def test_other_scores(queries: int, keys: int, scores: str, window: int, kind: str) -> None:
    """A factor of their own and a soft cap, whose gradients torch computes for the definition."""
    check(inputs(2, queries, keys, dtype=torch.float64), window, numbered(kind, 2, keys), SCORES[scores])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_scores_in_narrow_dtypes(dtype: torch.dtype) -> None:
    for scores in SCORES.values():
        check(inputs(2, 130, 130, dtype=dtype), 0, None, scores)


def test_what_is_hidden_changes_no_bit() -> None:
    """Neither later tokens, nor those out of the window, nor those of other documents."""
    given = inputs(1, 400, 400)
    documents = (torch.arange(400) >= 100).long().unsqueeze(0)
    for mask, first, end in ((AttentionMask(50), 250, 300), (AttentionMask(0, documents), 100, 300)):
        changed = [each.detach().clone() for each in given]
        for each in changed:
            each[:, :first] += 1
            each[:, end:] += 1
        before, after = (
            attention(*each, mask)[:, end - 1 if mask.window else first : end] for each in (given, changed)
        )
        assert torch.equal(before, after)
        assert not torch.equal(attention(*given, mask), attention(*changed, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["none", "few"])
def test_backward_keeps_nothing_of_the_matrix(dtype: torch.dtype, kind: str) -> None:
    """Inputs, result, a number for each query and the documents."""
    documents = numbered(kind, 2, 2000)
    q, k, v = inputs(2, 2000, 2000, dtype=dtype)
    with recording_saved(()) as saved:
        out = attention(q, k, v, AttentionMask(64, documents))
    sums = 2 * 2000 * 4 * 4
    assert saved.nbytes == sum(each.nbytes for each in (q, k, v, out)) + sums + (8 * 2 * 2000 if kind == "few" else 0)


@pytest.mark.parametrize(("window", "kind"), [(64, "none"), (0, "many"), (64, "few")])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tensor_is_as_large_as_the_matrix(dtype: torch.dtype, softcap: float, window: int, kind: str) -> None:
    largest = 0

    class Measuring(OperationMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            largest = max([largest, *(each.numel() for each in tree_leaves(found) if isinstance(each, Tensor))])
            return found

    length, documents = 3000, numbered(kind, 1, 3000)
    q, k, v = (each.detach() for each in inputs(1, length, length, (1, 1), dtype=dtype))
    sinks = torch.ones(1) if softcap else None
    with Measuring():
        out, sums = module._forward(q, k, v, sinks, documents, window, None, softcap)
        module._backward(out, q, k, v, sinks, documents, out, sums, window, None, softcap)
    assert 0 < largest <= length * 64 < length**2 / 40


def test_a_soft_cap_of_a_long_sequence_takes_runs_of_queries() -> None:
    """As no fused kernel computes it: no more than 256 queries at once."""
    most, length = 0, 1500

    class Measuring(OperationMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            nonlocal most
            found = func(*args, **(kwargs or {}))
            most = max([most, *(each.numel() for each in tree_leaves(found) if isinstance(each, Tensor))])
            return found

    q, k, v = inputs(1, length, length, (1, 1))
    with Measuring():
        attention(q, k, v, scoring=Scoring(softcap=2.0)).sum().backward()
    assert 0 < most <= 256 * length


def test_gradients_of_keys_that_many_tiles_use_do_not_stagnate() -> None:
    """In bf16 a sum of ones stops growing at 256."""
    q, k, v = (torch.zeros(1, 3, 1, 2, dtype=torch.bfloat16) for _ in range(3))
    (part,) = tile_inputs(q, k, v, AttentionMask(0, torch.zeros(1, 3, dtype=torch.int64)), None)
    gradients, ones = TileGradients(q, k, v), torch.ones(1, 1, 3, 2, dtype=torch.bfloat16)
    for _ in range(512):
        gradients.add(part, (ones, ones, ones))
    of_q, of_k, of_v = gradients.whole()
    assert of_q.eq(1).all()
    assert of_k.eq(512).all()
    assert of_v.eq(512).all()
    assert {each.dtype for each in (of_q, of_k, of_v)} == {torch.bfloat16}


def test_shapes_without_memory() -> None:
    """As in a dry run, where no document has a bound."""
    documents = torch.zeros(2, 1 << 20, dtype=torch.int64)
    with fake_tensors():
        q, k, v = (torch.empty(2, 1 << 20, heads, 64, requires_grad=True) for heads in (8, 2, 2))
        out = attention(q, k, v, AttentionMask(512, documents * 1))
        out.sum().backward()
    assert out.shape == (2, 1 << 20, 512)
    assert k.grad is not None
    assert k.grad.shape == k.shape


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_compiled_code_calls_it_as_one_operator(softcap: float) -> None:
    """Without a break of the graph, and for other documents without being compiled anew; only one in each pass, with
    none of the tiles' own operations beside it."""
    given = [*inputs(2, 300, 300), torch.linspace(-1, 1, 4)]
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def twice(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, documents: Tensor) -> Tensor:
        return attention(q, k, v, AttentionMask(9, documents), Scoring(None, softcap, sinks)) * 2

    compiled = torch.compile(twice, fullgraph=True, backend=backend)
    for seed in (1, 2):
        documents = numbered("few", 2, 300, seed)
        found = with_gradients(compiled, given, documents)
        expected = with_gradients(twice, given, documents)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
    (graph,) = graphs
    assert operators_of(graph) == ["tiled_attention", "tiled_attention_backward"]

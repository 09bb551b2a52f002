"""Attention with dropout in windows and documents, whose backward pass draws the masks again."""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.ops.attention import masked_weights, numbered
from tests.support.compiled import operators_of
from tests.support.saved_tensors import recording_saved
from threefold.models.layers.attention import CausalAttention
from threefold.models.layers.decoder import SampleInfo
from threefold.random.dropout import sample_keys


def definition(core: CausalAttention, q: Tensor, k: Tensor, v: Tensor, samples: SampleInfo) -> Tensor:
    weights = core.dropout(masked_weights(q, k, core.window, samples.documents, core.scoring), samples.keys)
    served = v.transpose(1, 2).repeat_interleave(q.shape[2] // v.shape[2], 1)
    return (weights @ served).transpose(1, 2).flatten(2)


def inputs(queries: int, keys: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    sizes = ((queries, 4), (keys, 2), (keys, 2))
    return [torch.randn(2, *size, 6, generator=draw).double().requires_grad_() for size in sizes]


@pytest.mark.parametrize("kind", ["none", "few", "apart"])
@pytest.mark.parametrize(
    ("window", "queries", "keys", "softcap"),
    [(0, 40, 40, 0.0), (0, 600, 600, 0.0), (70, 300, 300, 0.0), (9, 33, 140, 0.0), (0, 40, 40, 0.8), (9, 33, 140, 0.8)],
)
def test_dropout_of_what_is_attended_to(window: int, queries: int, keys: int, softcap: float, kind: str) -> None:
    core = CausalAttention(0.3, window, "blocks.0.attn.core", softcap=softcap, sinks=4 if softcap else 0).double()
    if core.sinks is not None:
        core.sinks.data.copy_(torch.linspace(-1, 2, 4))
    samples = SampleInfo(sample_keys(1, 2, torch.arange(2)), numbered(kind, 2, keys))
    found = []
    for compute in (core, lambda *given: definition(core, *given)):
        given = inputs(queries, keys)
        out = compute(*given, samples)
        learned = [*given, *core.parameters()]
        found.append([out, *torch.autograd.grad(out, learned, torch.ones_like(out).cumsum(-1))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("window", "length"), [(32, 1500), (0, 600)])
def test_dropout_keeps_nothing_of_the_matrix(window: int, length: int) -> None:
    """Of a window, or of a long sequence."""
    core = CausalAttention(0.1, window, "blocks.0.attn.core")
    q, k, v = inputs(length, length)
    samples = SampleInfo(sample_keys(1, 2, torch.arange(2)))
    with recording_saved(()) as saved:
        core(q, k, v, samples)
    kept = saved.nbytes
    assert kept == sum(each.nbytes for each in (q, k, v)) + 8 * 2


@pytest.mark.slow
def test_compiled_code_calls_it_as_one_operator() -> None:
    """One graph for layers of different streams, with one operator in each pass."""
    graphs, outputs = [], []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    samples = SampleInfo(sample_keys(1, 2, torch.arange(2)), numbered("few", 2, 300))
    compiled = torch.compile(lambda core, *given: core(*given), fullgraph=True, backend=backend)
    for name in ("blocks.0.attn.core", "blocks.1.attn.core"):
        core, found = CausalAttention(0.3, 9, name), []
        for compute in (core, partial(compiled, core)):
            given = inputs(300, 300)
            out = compute(*given, samples)
            out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).double())
            found.append([out, *(each.grad for each in given)])
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)
        outputs.append(found[0][0])
    assert not torch.isclose(*outputs).all()
    (graph,) = graphs
    assert operators_of(graph) == ["dropped_attention", "dropped_attention_backward"]

"""Bounds for torch's kernel of sequences of different lengths, which a stand-in computes where there is no GPU."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.ops.attention import masked_attention, numbered
from threefold.ops import attention as module
from threefold.ops.attention import attention, document_bounds, varlen_lengths
from threefold.ops.kernels import AttentionMask


def stand_in(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, most_q: int, most_k: int, **options: object
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` by its documentation: each sequence alone, the last query at the last
    key, and a window of so many keys before and after a query's own."""
    before, after = options["window_size"]
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert options["enable_gqa"] == (q.shape[1] != k.shape[1])
    assert after == 0
    assert most_q == starts_q.diff().max()
    assert most_k == starts_k.diff().max()
    out = torch.full_like(q, torch.nan)
    for each_q, each_k in zip(starts_q.unfold(0, 2, 1).tolist(), starts_k.unfold(0, 2, 1).tolist(), strict=True):
        if each_q[0] < each_q[1]:
            parts = (x[slice(*place)].unsqueeze(0) for x, place in ((q, each_q), (k, each_k), (v, each_k)))
            found = masked_attention(*parts, before + 1)
            out[slice(*each_q)] = found[0].view(-1, *q.shape[1:]).to(q.dtype)
    return out


@pytest.mark.parametrize("kind", ["none", "single tokens", "few", "many"])
@pytest.mark.parametrize("window", [0, 1, 30])
@pytest.mark.parametrize("queries", [150, 40])
def test_bounds(queries: int, window: int, kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = (2, queries, 4, 8), (2, 150, 2, 8), (2, 150, 2, 8)
    q, k, v = (torch.randn(shape, generator=draw) for shape in shapes)
    documents = numbered(kind, 2, 150)
    on_gpu = patch.object(module, "varlen_serves", lambda _: True)
    with on_gpu, patch("torch.nn.attention.varlen.varlen_attn", stand_in):
        found = attention(q, k, v, AttentionMask(window, documents))
    torch.testing.assert_close(found, masked_attention(q, k, v, window, documents).float())


def test_documents_whose_parts_lie_apart_have_no_bounds() -> None:
    q = torch.zeros(2, 20, 1, 8)
    assert varlen_lengths(q, q, AttentionMask(0, numbered("apart", 2, 20))) is None


def test_document_bounds() -> None:
    documents = torch.tensor([[3, 3, 4, 6, 6], [0, 0, 0, 0, 0], [1, 0, 0, 2, 2], [1, 0, 1, 2, 2]])
    assert list(document_bounds(4, 5, documents)) == [[0, 2, 3, 5], [0, 5], [0, 1, 3, 5], None]
    assert list(document_bounds(2, 4, documents)) == [[0, 2, 3, 4], [0, 4]]
    assert list(document_bounds(2, 4, None)) == [[0, 4]] * 2

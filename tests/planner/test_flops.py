"""Operations of attention that a dry run counts: of a window those of its tiles."""

from typing import Any

import pytest
import torch

from threefold.models.layers.attention import CausalAttention
from threefold.models.layers.decoder import SampleInfo
from threefold.planner.dry_step import FlopCount
from threefold.torch_private.fake import OperationMode, fake_tensors


class Counting(OperationMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = FlopCount()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count(func, args, kwargs or {}, out)
        return out


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("documents", [False, True])
def test_attention_in_a_window(documents: bool, dropout: float) -> None:
    """Tiles of 256 queries, the first of 256 keys, the others of 511: 7 products of 2 · 4 · 8 operations a pair."""
    core = CausalAttention(dropout, 256, "core")
    with fake_tensors(), Counting() as mode:
        q, k, v = (torch.empty(2, 4096, heads, 8, requires_grad=True) for heads in (4, 1, 1))
        of_rows = torch.zeros(2, 4096, dtype=torch.int64) if documents else None
        core(q, k, v, SampleInfo(torch.zeros(2, dtype=torch.int64), of_rows)).sum().backward()
    pairs = 256 * 256 + 15 * 256 * 511
    assert mode.count.total == 7 * 2 * 2 * 4 * 8 * pairs

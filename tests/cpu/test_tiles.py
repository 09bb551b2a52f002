"""Tiles hold every pair that is attended to once, and little else."""

import pytest
import torch

from tests.ops.attention import hidden, numbered
from threefold.cpu.tiles import shortest_tile, tile_inputs, tiles
from threefold.ops.kernels import AttentionMask

DEVICE = torch.device("cpu")
SHAPES = [  # queries and keys
    (range(333), range(333)),
    (range(200, 333), range(333)),
    (range(100, 150), range(100, 150)),
    (range(200, 250), range(50, 100)),  # of another rank of a ring
    (range(50, 100), range(200, 250)),
]


@pytest.mark.parametrize(("longest", "shortest"), [(None, 64), (0, 64), (None, 256)])
@pytest.mark.parametrize("kind", ["none", "one", "single tokens", "few", "many", "apart"])
@pytest.mark.parametrize("window", [0, 1, 70, 300])
@pytest.mark.parametrize(("queries", "keys"), SHAPES, ids=str)
def test_every_pair_is_in_one_tile(
    queries: range, keys: range, window: int, kind: str, longest: int | None, shortest: int
) -> None:
    documents = numbered(kind, 2, 333)
    wanted = ~hidden(333, 333, window, documents).expand(2, -1, -1)
    times = torch.zeros(2, 333, 333, dtype=torch.int64)
    for tile in tiles(2, queries, keys, AttentionMask(window, documents), longest, shortest):
        seen = ~tile.hidden(DEVICE)
        assert seen.any()
        if tile.is_full:
            assert seen.all()
        if tile.is_causal:
            assert torch.equal(seen, torch.ones_like(seen).tril())
        assert not (tile.is_full and tile.is_causal and len(tile.queries) > 1)
        times[tile.rows, tile.queries.start : tile.queries.stop, tile.keys.start : tile.keys.stop] += seen
    inside = torch.zeros_like(times, dtype=torch.bool)
    inside[:, queries.start : queries.stop, keys.start : keys.stop] = True
    assert torch.equal(times, (wanted & inside).long())


@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize(
    ("window", "kind"), [(64, "none"), (256, "none"), (0, "few"), (0, "many"), (256, "few"), (1, "none")]
)
def test_the_work_is_what_is_attended_to(length: int, window: int, kind: str) -> None:
    """And at most some 64 keys more for each query, or as many again as the window."""
    documents = numbered(kind, 1, length)
    found = list(tiles(1, range(length), range(length), AttentionMask(window, documents)))
    area = sum(len(tile.queries) * len(tile.keys) for tile in found)
    attended = int((~hidden(length, length, window, documents)).sum())
    assert attended <= area <= 2 * attended + 64 * length
    assert len(found) <= length / 64 + (0 if documents is None else 2 * int(documents.max())) + 2


@pytest.mark.parametrize(("dtype", "queries"), [(torch.bfloat16, 256), (torch.float32, 64), (torch.float64, 64)])
def test_a_small_window_has_few_tiles_where_a_call_costs_more_than_its_products(
    dtype: torch.dtype, queries: int
) -> None:
    q = torch.zeros(1, 300, 1, 4, dtype=dtype)
    least = shortest_tile(q)
    assert least == queries
    parts = tile_inputs(q, q, q, AttentionMask(20), None, least)
    assert [len(each.tile.queries) for each in parts] == [queries] * (300 // queries) + [300 % queries]


def test_rows_that_are_alike_share_tiles() -> None:
    documents = torch.tensor([[0, 0, 1], [5, 5, 6], [5, 5, 6], [0, 1, 1]])
    rows = [tile.rows for tile in tiles(4, range(3), range(3), AttentionMask(0, documents))]
    assert rows == [slice(0, 1), slice(1, 3), slice(3, 4)]
    assert [tile.rows for tile in tiles(4, range(3), range(3), AttentionMask())] == [slice(0, 4)]

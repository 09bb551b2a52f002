"""Philox: slices of one whole tensor's normal numbers, whatever the slicing."""

import pytest
import torch

from threefold.random.rng import _AT_ONCE, _philox2x32, fill_normal_, stream_key


def test_philox_gives_the_published_answers() -> None:
    """Known answers of Random123's kat_vectors for philox2x32, 10 rounds."""
    for counter, key, expected in (
        ((0x00000000, 0x00000000), 0x00000000, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ):
        word = counter[0] | counter[1] << 32
        low, high = _philox2x32(torch.tensor([word - (1 << 64) if word >> 63 else word]), key)
        assert (low.item(), high.item()) == expected


@pytest.mark.parametrize("shape", [(7,), (13, 5), (6, 4, 3)])
def test_any_slice_holds_the_whole_tensors_numbers(shape: tuple[int, ...]) -> None:
    whole = fill_normal_(torch.empty(shape), 0.5, 17, shape, (0,) * len(shape))
    start = tuple(size // 3 for size in shape)
    cut = tuple(slice(first, None) for first in start)
    part = torch.empty_like(whole[cut].contiguous())
    assert torch.equal(fill_normal_(part, 0.5, 17, shape, start), whole[cut])


def test_blocks_larger_than_one_chunk_agree() -> None:
    shape = (300, 517)
    whole = fill_normal_(torch.empty(shape), 1.0, 3, shape, (0, 0))
    columns = fill_normal_(torch.empty(300, 17), 1.0, 3, shape, (0, 500))
    assert torch.equal(columns, whole[:, 500:])


@pytest.mark.parametrize("elements", [1, 100, 1 << 20])
def test_numbers_do_not_depend_on_how_many_are_made_at_once(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """A GPU makes more at once than a CPU."""
    shape = (30, 51)
    expected = fill_normal_(torch.empty(shape), 1.0, 3, shape, (0, 0))
    monkeypatch.setitem(_AT_ONCE, "cpu", elements)
    assert fill_normal_(torch.empty(shape), 1.0, 3, shape, (0, 0)).equal(expected)


def test_values_are_normal() -> None:
    values = fill_normal_(torch.empty(400_000, dtype=torch.float64), 2.0, stream_key("a"), (400_000,), (0,))
    assert abs(values.mean().item()) < 0.02
    assert values.std().item() == pytest.approx(2.0, rel=0.01)
    assert ((values / 2) ** 4).mean().item() == pytest.approx(3.0, rel=0.05)


def test_streams_differ_by_every_part_of_their_key() -> None:
    keys = {stream_key(*parts) for parts in ((1, "a"), (2, "a"), (1, "b"), ("1", "a"), (1, "a", ""), ("1a",))}
    assert len(keys) == 6
    first, second = (fill_normal_(torch.empty(9), 1.0, stream_key(seed, "w"), (9,), (0,)) for seed in (1, 2))
    assert not torch.isclose(first, second).any()

"""Keyed randomness: slices of one whole, whatever the slicing; S12's streams."""

import pytest
import torch
from torch import Tensor

from threefold.random.dropout import Dropout, keep_mask, sample_keys
from threefold.random.keys import stream_key
from threefold.random.philox import _philox2x32, fill_normal_
from threefold.random.positions import Slice


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


def mask(rows: Tensor, step: int = 4, site: int = 9, p: float = 0.25) -> Tensor:
    return keep_mask(sample_keys(1, step, rows), site, torch.Size([len(rows), 6, 40, 50]), p)


def test_masks_drop_the_right_share_and_do_not_repeat() -> None:
    rows = torch.arange(8)
    base = mask(rows)
    assert base.float().mean().item() == pytest.approx(0.75, abs=0.01)
    for other in (mask(rows, step=5), mask(rows, site=10), mask(rows + 8), base.roll(1, 0), base.roll(1, 2)):
        # Independent masks agree on 0.75² + 0.25² of their elements.
        assert (other == base).float().mean().item() == pytest.approx(0.625, abs=0.01)


def test_a_mask_depends_on_its_sample_alone() -> None:
    rows = torch.arange(8)
    assert torch.equal(mask(rows)[3:5], mask(rows[3:5]))


@pytest.mark.parametrize(("dim", "size"), [(1, 6), (2, 40), (3, 50)])
def test_a_split_mask_is_a_part_of_the_whole(dim: int, size: int) -> None:
    keys = sample_keys(1, 4, torch.arange(3))
    shape = [3, 6, 40, 50]
    whole = keep_mask(keys, 9, torch.Size(shape), 0.25)
    shape[dim] = size - 2
    part = keep_mask(keys, 9, torch.Size(shape), 0.25, {dim: Slice(2, size)})
    assert torch.equal(part, whole.narrow(dim, 2, size - 2))


def test_dropout_keeps_the_mean_and_is_off_without_keys_and_in_evaluation() -> None:
    dropout = Dropout(0.3)
    keys = sample_keys(0, 0, torch.arange(4))
    x = torch.ones(4, 100, 100)
    assert dropout(x, keys).mean().item() == pytest.approx(1.0, abs=0.02)
    assert dropout(x, None) is x
    assert dropout.eval()(x, keys) is x


def test_dropout_replays() -> None:
    dropout, keys, x = Dropout(0.3), sample_keys(0, 3, torch.arange(4)), torch.ones(4, 10, 10)
    state = torch.get_rng_state()
    assert torch.equal(dropout(x, keys), dropout(x, keys))
    assert torch.equal(torch.get_rng_state(), state)


def test_nearly_everything_can_be_dropped() -> None:
    keys = sample_keys(0, 0, torch.arange(2))
    assert not keep_mask(keys, 1, torch.Size([2, 8, 8]), 1 - 1e-12).any()

"""Keyed dropout: the masks of a slice are those of the whole, whatever the slicing; other layers have others."""

import pytest
import torch
from torch import Tensor

from threefold.random.dropout import Dropout, keep_mask, sample_keys
from threefold.random.rng import Slice


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


def test_layers_of_different_names_have_unrelated_masks_and_parts_keep_the_name() -> None:
    keys, x = sample_keys(0, 0, torch.arange(4)), torch.ones(4, 6, 50)
    first, second = (Dropout(0.5, name)(x, keys) for name in ("blocks.0.dropout.attn", "blocks.1.dropout.attn"))
    assert (first == second).float().mean().item() == pytest.approx(0.5, abs=0.1)
    part = Dropout(0.5, "blocks.0.dropout.attn").of_part({1: Slice(2, 6)})
    assert torch.equal(part(x[:, 2:4], keys), first[:, 2:4])

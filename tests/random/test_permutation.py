"""The keyed permutation is a bijection, looks random, and never changes between versions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.random import MAX_ITEMS, KeyedPermutation, samples_at


def order_of(n: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return KeyedPermutation(n, seed, epoch)(np.arange(n))


@pytest.mark.parametrize(
    "n", [1, 2, 3, 4, 5, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 4095, 4096, 4097, 100_003]
)
def test_every_item_comes_exactly_once(n: int) -> None:
    np.testing.assert_array_equal(np.sort(order_of(n, seed=n)), np.arange(n))


@given(n=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_a_bijection_for_any_key(n: int, seed: int, epoch: int) -> None:
    assert np.bincount(order_of(n, seed, epoch), minlength=n).tolist() == [1] * n


@given(n=st.integers(2**40, MAX_ITEMS), start=st.integers(0, 2**39))
def test_huge_ranges_stay_inside_and_distinct(n: int, start: int) -> None:
    items = KeyedPermutation(n, seed=3)(np.arange(start, start + 100))
    assert items.min() >= 0
    assert items.max() < n
    assert len(np.unique(items)) == 100


def test_seed_epoch_and_purpose_each_change_the_order() -> None:
    orders = [order_of(500, 1, 0), order_of(500, 2, 0), order_of(500, 1, 1), order_of(500, 0, 1)]
    orders.append(KeyedPermutation(500, 1, 0, purpose="split")(np.arange(500)))
    for i, one in enumerate(orders):
        for other in orders[i + 1 :]:
            assert np.mean(one == other) < 0.05


def test_the_order_is_the_same_in_every_version() -> None:
    """A changed order would make a resumed run read other samples, so these digits are for ever."""
    assert KeyedPermutation(1000, 1234, 0)(np.arange(8)).tolist() == [495, 508, 554, 224, 755, 386, 932, 93]
    assert KeyedPermutation(2**50 + 1, 1234, 7)(np.arange(3)).tolist() == [
        1058806980693573,
        673086226161649,
        507418051297147,
    ]
    assert order_of(5, seed=9).tolist() == [2, 4, 1, 0, 3]


def test_items_in_any_shape_and_subset_agree_with_the_whole() -> None:
    whole = order_of(777, seed=5)
    some = np.array([[5, 776], [0, 5]])
    np.testing.assert_array_equal(KeyedPermutation(777, 5)(some), whole[some])
    assert KeyedPermutation(777, 5)(np.array([], dtype=np.int64)).shape == (0,)


@pytest.mark.parametrize("n", [0, -1, MAX_ITEMS + 1])
def test_a_size_out_of_range_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match="1 to 2"):
        KeyedPermutation(n, 0)


def test_no_structure_of_the_indices_is_left() -> None:
    """Rank correlation, runs up and neighbours of a long order are those of a random one, within five sigma."""
    n = 100_000
    order = order_of(n, seed=11)
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 5 / np.sqrt(n)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / np.sqrt(n)
    assert abs(np.mean(order[1:] > order[:-1]) - 0.5) < 5 * np.sqrt(1 / 12 / n)
    assert np.sum(np.abs(np.diff(order)) == 1) < 15  # a random order has 2 of them
    assert np.sum(order == np.arange(n)) < 10  # and 1 fixed point
    for bit in range(16):  # each bit of the index leaves the item's mean where it is
        odd = (np.arange(n) >> bit) & 1
        assert abs(order[odd == 1].mean() - order[odd == 0].mean()) < 6 * n / np.sqrt(12 * n / 4)


@pytest.mark.parametrize("n", [2, 3, 6, 10])
def test_small_orders_are_all_about_equally_likely(n: int) -> None:
    """Each item takes each place in about 1/n of the epochs (chi-square per place, far beyond its 1e-6 quantile)."""
    epochs = 600
    orders = np.array([order_of(n, 0, epoch) for epoch in range(epochs)])
    for place in range(n):
        counts = np.bincount(orders[:, place], minlength=n)
        assert np.sum((counts - epochs / n) ** 2) / (epochs / n) < 30 + 3 * n


def test_counters_run_through_epochs() -> None:
    n = 7
    items = samples_at(np.arange(3 * n + 2), n, seed=4)
    for epoch in range(3):
        np.testing.assert_array_equal(items[epoch * n : (epoch + 1) * n], order_of(n, 4, epoch))
    np.testing.assert_array_equal(items[3 * n :], order_of(n, 4, 3)[:2])


@given(st.lists(st.integers(0, 2**55), min_size=1, max_size=40), st.integers(1, 2**30))
def test_a_counters_sample_does_not_depend_on_its_company(counters: list[int], n: int) -> None:
    together = samples_at(np.array(counters, dtype=np.int64), n, seed=8)
    alone = [samples_at(np.array([counter], dtype=np.int64), n, seed=8)[0] for counter in counters]
    assert together.tolist() == alone

"""Batches of any map-style data set: the same global batches for every dp, epochs, and resuming in another dp."""

from collections.abc import Iterable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

import threefold
from threefold.compat.map_dataset import GlobalBatchSampler
from threefold.errors import UserError


class Squares(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": index, "square": torch.tensor([float(index**2)])}


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(3))


def replica(index: int, size: int, tp: int = 0) -> Any:
    """All of a mesh that a loader looks at."""
    axes = {"dp": SimpleNamespace(index=index, size=size), "tp": SimpleNamespace(index=tp)}
    return SimpleNamespace(**axes, world=SimpleNamespace(size=1))


def samplers(size: int, batch: int, dp: int, **options: Any) -> list[GlobalBatchSampler]:
    return [GlobalBatchSampler(Squares(size), batch, replica(index, dp), **options) for index in range(dp)]


def global_batches(made: list[GlobalBatchSampler]) -> list[list[int]]:
    """What is left of the epoch, the rows of all replicas together; all have as many."""
    parts = [list(sampler) for sampler in made]
    assert len({len(part) for part in parts}) == 1
    return [joined(rows) for rows in zip(*parts, strict=True)]


def joined(parts: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


sizes = st.tuples(st.integers(1, 40), st.integers(1, 4), st.sampled_from([1, 2, 3, 4]))


@given(sizes, st.booleans(), st.booleans())
def test_global_batches_are_those_of_one_replica_and_cover_the_data(shape: Any, drop_last: bool, shuffle: bool) -> None:
    size, rows, dp = shape
    batch = 12 * rows
    if drop_last and size < batch:
        size += batch
    options = {"seed": 5, "drop_last": drop_last, "shuffle": shuffle}
    alone = global_batches(samplers(size, batch, 1, **options))
    assert global_batches(samplers(size, batch, dp, **options)) == alone
    assert {len(each) for each in alone} == {batch}
    read = joined(alone)
    if drop_last:
        assert len(set(read)) == len(read) == size // batch * batch
    else:
        assert sorted(read[:size]) == list(range(size))
        assert read[size:] == [read[place % size] for place in range(size, len(read))]
    if not shuffle:
        assert read[: min(size, len(read))] == list(range(min(size, len(read))))


def test_an_epoch_has_an_order_of_its_own_that_follows_from_the_seed() -> None:
    loader = threefold.DistributedDataLoader(Squares(50), 10, seed=1)
    orders = []
    for epoch in range(3):
        assert loader.epoch == epoch
        orders.append([int(n) for batch in loader for n in batch["number"]])
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(50)) for order in orders)
    other = threefold.DistributedDataLoader(Squares(50), 10, seed=2)
    assert [int(n) for batch in other for n in batch["number"]] not in orders
    other = threefold.DistributedDataLoader(Squares(50), 10, seed=1)
    other.set_epoch(2)
    assert [int(n) for batch in other for n in batch["number"]] == orders[2]


@given(st.integers(0, 12), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.booleans())
def test_resuming_with_another_dp_reads_what_was_left(steps: int, before: int, after: int, drop_last: bool) -> None:
    """Three epochs of 5 batches (4 with drop_last), saved after any step, by every replica alike."""
    options = {"seed": 3, "drop_last": drop_last}
    whole = walk(samplers(18, 4, 1, **options), 12)
    first = samplers(18, 4, before, **options)
    seen = walk(first, steps)
    states = [sampler.state_dict() for sampler in first]
    assert all(state == states[0] for state in states)
    second = samplers(18, 4, after, **options)
    for sampler in second:
        sampler.load_state_dict(states[0])
    assert seen + walk(second, 12 - steps) == whole


def walk(made: list[GlobalBatchSampler], steps: int) -> list[list[int]]:
    """So many global batches, over epochs."""
    found: list[list[int]] = []
    while len(found) < steps:
        for sampler in made:
            sampler.begin_next_epoch()
        for batch in global_batches(made)[: steps - len(found)]:
            found.append(batch)
            for sampler in made:
                sampler.advance()
    return found


def test_resuming_with_another_batch_size_reads_the_rest_of_the_epoch() -> None:
    first, second = GlobalBatchSampler(Squares(30), 6), GlobalBatchSampler(Squares(30), 4)
    read = walk([first], 3)
    second.load_state_dict(first.state_dict())
    assert sorted(joined(read + list(second))) == list(range(30))


def test_consumed_samples_count_epochs_in_batches_of_todays_size() -> None:
    """Ten samples are three batches of four, the last of which is filled, and two of five."""
    loader, other = threefold.DistributedDataLoader(Squares(10), 4), threefold.DistributedDataLoader(Squares(10), 5)
    counted = [loader.consumed_samples for _ in loader]
    assert counted == [4, 8, 12]
    next(iter(loader))
    assert loader.consumed_samples == 16
    other.load_state_dict(loader.state_dict())
    assert other.consumed_samples == 14
    assert threefold.DistributedDataLoader(Squares(10), 4, drop_last=True).consumed_samples == 0


def test_workers_read_ahead_but_only_what_was_given_counts() -> None:
    loader = threefold.DistributedDataLoader(Squares(32), 4, replica(1, 2), seed=4, num_workers=1, prefetch_factor=4)
    alone = threefold.DistributedDataLoader(Squares(32), 4, replica(1, 2), seed=4)
    state = torch.get_rng_state()
    batches = iter(loader)
    given = [next(batches) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), state)
    assert loader.state_dict() == {"epoch": 0, "start": 12, "seed": 4, "samples": 32}
    assert loader.consumed_samples == 12
    for batch, expected in zip(given, alone, strict=False):
        assert batch["number"].tolist() == expected["number"].tolist()
        assert batch["square"].shape == (2, 1)
    del batches


def test_a_loop_that_is_left_early_is_continued() -> None:
    loader, found = (
        threefold.DistributedDataLoader(Squares(12), 4, seed=1, collate_fn=lambda rows: [r["number"] for r in rows]),
        [],
    )
    for batch in loader:
        found += batch
        break
    for batch in loader:
        found += batch
    assert sorted(found) == list(range(12))
    assert (loader.epoch, len(loader)) == (1, 3)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (
        Stream(),
        {},
        "dataset is a Stream, an IterableDataset, whose order cannot be keyed by a seed nor resumed; give a",
    ),
    (iter([1]), {}, "dataset is a list_iterator but must be of map style; give one with __len__ and __getitem__."),
    ([], {}, "dataset is a list without a sample; give one with at least 1."),
    (
        [1, 2],
        {"global_batch_size": 3},
        "global_batch_size is 3 but must be a multiple of dp 2; use global_batch_size=4.",
    ),
    (
        [1, 2],
        {"global_batch_size": 0},
        "global_batch_size is 0 but must be a whole number of samples; use global_batch",
    ),
    ([1, 2], {"drop_last": True}, "The data set has 2 samples, fewer than global_batch_size 4, so with drop_last an "),
    ([1, 2], {"batch_size": 2}, "batch_size follows from global_batch_size, mesh and seed; leave it out."),
]


@pytest.mark.parametrize(("dataset", "options", "sentence"), WRONG, ids=[sentence for *_, sentence in WRONG])
def test_wrong_calls_are_one_sentence(dataset: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        threefold.DistributedDataLoader(dataset, mesh=replica(0, 2), **{"global_batch_size": 4, **options})
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"epoch": 1}, "The state of a sampler lacks 'start'; give what `state_dict` returned."),
        ({"samples": 7}, "The state is of a data set of 7 samples but this one has 12; give the data set it was saved"),
        ({"seed": 9}, "The state is of seed 9 but the sampler has seed 0, so it would read samples twice; use seed=9."),
    ],
)
def test_a_state_of_another_order_is_refused(state: dict[str, int], sentence: str) -> None:
    loader = threefold.DistributedDataLoader(Squares(12), 4)
    whole = {} if "epoch" in state else loader.state_dict()
    with pytest.raises(UserError) as caught:
        loader.load_state_dict({**whole, **state})
    assert str(caught.value).startswith(sentence)

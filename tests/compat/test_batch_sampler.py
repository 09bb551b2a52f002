"""Paddle's batch sampler: its signature, its order, its padding and its epochs."""

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import threefold as t3
from threefold.compat.paddle import DistributedBatchSampler


def epoch(size: int, batch: int, ranks: int, **options: Any) -> list[list[list[int]]]:
    return [list(DistributedBatchSampler(range(size), batch, ranks, rank, **options)) for rank in range(ranks)]


def test_the_signature_is_paddles() -> None:
    defaults = {name: each.default for name, each in inspect.signature(DistributedBatchSampler).parameters.items()}
    required = inspect.Parameter.empty
    assert [*defaults.items()] == [
        *[("dataset", required), ("batch_size", required), ("num_replicas", None), ("rank", None)],
        *[("shuffle", False), ("drop_last", False)],
    ]


def test_batches_go_to_the_ranks_in_turn() -> None:
    # As `paddle.io.DistributedBatchSampler` of Paddle 2.6 gives them.
    assert epoch(10, 2, 2) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]
    assert epoch(10, 2, 2, drop_last=True) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert epoch(11, 2, 3) == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 0]]]
    assert epoch(7, 3, 2) == [[[0, 1, 2], [6]], [[3, 4, 5], [0]]]
    assert epoch(2, 2, 5) == [[[0]], [[1]], [[0]], [[1]], [[0]]]
    assert epoch(5, 2, 1) == [[[0, 1], [2, 3], [4]]]


@given(size=st.integers(1, 60), batch=st.integers(1, 9), ranks=st.integers(1, 7), drops=st.booleans())
def test_every_sample_is_read_and_all_ranks_have_equally_many_batches(
    size: int, batch: int, ranks: int, drops: bool
) -> None:
    found = epoch(size, batch, ranks, shuffle=True, drop_last=drops)
    samplers = [DistributedBatchSampler(range(size), batch, ranks, rank, drop_last=drops) for rank in range(ranks)]
    for batches, sampler in zip(found, samplers, strict=True):
        assert len(batches) == len(sampler)
        assert [len(each) for each in batches] == [len(each) for each in found[0]]
        assert all(len(each) == batch for each in batches[:-1])
    read = [index for batches in found for each in batches for index in each]
    if not drops:
        assert set(read) == set(range(size))
        assert len(read) == -(-size // ranks) * ranks
    else:
        assert len(read) == -(-size // ranks) // batch * batch * ranks


def test_each_epoch_has_its_own_order() -> None:
    sampler = DistributedBatchSampler(range(11), 2, 3, 1, shuffle=True)
    epochs = [list(sampler) for _ in range(3)]
    assert sampler.epoch == 3
    assert epochs[0] != epochs[1] != epochs[2]
    sampler.set_epoch(1)
    assert list(sampler) == epochs[1]
    order = [*range(11), 0]
    np.random.RandomState(1).shuffle(order)  # Paddle's draw
    assert epochs[1] == [order[2:4], order[8:10]]
    still = DistributedBatchSampler(range(11), 2, 3, 1)
    assert list(still) == list(still)
    assert still.epoch == 0
    loader = DataLoader([*range(11)], batch_sampler=DistributedBatchSampler(range(11), 2, 3, 1, shuffle=True))
    assert [[each.tolist() for each in loader] for _ in range(2)] == epochs[:2]
    assert len(loader) == 2


def of_ranks() -> list[Any]:
    t3.init_mesh()
    return list(DistributedBatchSampler(range(5), batch_size=2))


def of_a_mesh_with_tensor_ranks() -> tuple[str, list[Any]]:
    mesh = t3.init_mesh(dp=1, tp=2)
    with pytest.raises(t3.UserError) as raised:
        DistributedBatchSampler(range(5), batch_size=2)
    return str(raised.value), list(DistributedBatchSampler(range(5), 2, mesh.dp.size, mesh.dp.index))


def test_without_num_replicas_every_rank_has_its_samples(pool) -> None:
    assert pool.run(2, of_ranks) == [[[0, 1], [4]], [[2, 3], [0]]]
    said = (
        "num_replicas is not given, so each of the 2 ranks would read its own samples, but the mesh is dp 1 · tp 2 · "
        "pp 1, in which ranks share them; give num_replicas=mesh.dp.size and rank=mesh.dp.index."
    )
    assert pool.run(2, of_a_mesh_with_tensor_ranks) == [(said, [[0, 1], [2, 3], [4]])] * 2
    assert list(DistributedBatchSampler(range(3), 2)) == [[0, 1], [2]]  # a process alone


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: DistributedBatchSampler(Stream(), 2), "dataset is a Stream without samples or __len__; give"),
        (lambda: DistributedBatchSampler([], 2), "dataset is a list without samples or __len__; give"),
        (lambda: DistributedBatchSampler([1], 0), "batch_size is 0 but must be a whole number of at least 1; use 1."),
        (lambda: DistributedBatchSampler([1], 1, shuffle=1), "shuffle is 1 but must be True or False; use shuffle=Fal"),
        (lambda: DistributedBatchSampler([1], 1, 2, 2), "rank is 2 but num_replicas is 2, whose ranks are 0 to 1; use"),
        (lambda: DistributedBatchSampler([1], 1, 0), "num_replicas is 0 but must be a whole number of at least 1; use"),
        (
            lambda: DistributedBatchSampler([1], 1, torch.ones(1)),
            "num_replicas is a Tensor but must be a whole number of at least 1; use mesh.dp.size, or "
            "threefold.GlobalBatchSampler(dataset, global_batch_size, mesh).",
        ),
        (lambda: DistributedBatchSampler([1], 1, 1, -1), "rank is -1 but must be a whole number of at least 0; use m"),
    ],
)
def test_wrong_calls_are_one_sentence(call: Any, sentence: str) -> None:
    with pytest.raises(t3.UserError) as raised:
        call()
    assert str(raised.value).startswith(sentence)

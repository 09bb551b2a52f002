"""Data that ranks have already divided, and batches that differ within a replica, are refused before they train."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import threefold as t3
from tests.support.sentences import sentence
from threefold.comm.axis import Axis
from threefold.verify.worker_pool import WorkerPool


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


class Rows(Dataset):
    """Rows of numbers; `sharded` as other systems want it, and `augmented` by a generator."""

    def __init__(self, size: int = 24, sharded: str = "", augmented: str = "") -> None:
        self.rows = torch.arange(size * 4.0).view(size, 4) / 40
        ranks = distributed.get_world_size() if distributed.is_initialized() else 1
        if sharded == "strided":
            self.rows = self.rows[rank() :: ranks]
        elif sharded == "uneven":
            self.rows = self.rows[: size - rank()]
        self.augmented, self.own = augmented, np.random.default_rng(rank())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        if self.augmented == "global":
            row = row + torch.rand(4)
        elif self.augmented == "own":
            row = row + float(self.own.random())
        return {"x": row, "y": row.sum().view(1), "name": f"row {index}"}


class Stream(IterableDataset):
    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded

    def __iter__(self) -> Iterator[Any]:
        rows = range(24)
        return ((torch.full((4,), float(row)), torch.zeros(1)) for row in (rows[rank() :: 2] if self.sharded else rows))


def layers() -> t3.PipelineLayers:
    return t3.PipelineLayers([partial(nn.Linear, 4, 8), partial(nn.Linear, 8, 1)])


def loss_of(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch[1])


def pairs(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch["x"], batch["y"]


def custom_loop(sizes: dict[str, int], mine: bool, call: str) -> tuple[str, list[float]]:
    """Refusals and losses of a loop with torch's sampler over all ranks, or over the replicas (`mine`)."""
    mesh = t3.init_mesh(**sizes)
    model = t3.parallelize(layers(), mesh=mesh, dtype=torch.float64)
    optimizer = t3.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    ranks = (mesh.dp.size, mesh.dp.index) if mine else (mesh.world.size, mesh.rank)
    data = Rows()
    loader = DataLoader(data, batch_size=24 // ranks[0], sampler=DistributedSampler(data, *ranks, shuffle=False))
    losses: list[float] = []

    def steps() -> None:
        for batch in map(pairs, loader):
            if call == "eval_batch":
                losses.append(model.eval_batch(batch, loss_of))
                continue
            losses.append(model.train_batch(batch, loss_of))
            optimizer.step()

    return sentence(steps), losses


@pytest.mark.parametrize(
    ("sizes", "call"), [({"tp": 2}, "train_batch"), ({"pp": 2}, "train_batch"), ({"pp": 2}, "eval_batch")]
)
def test_a_sampler_over_all_ranks_is_refused_within_a_replica(
    pool: WorkerPool, sizes: dict[str, int], call: str
) -> None:
    ((_, expected),) = pool.run(1, custom_loop, {}, True, call)
    for refused, losses in pool.run(2, custom_loop, sizes, True, call):
        assert refused == ""
        assert losses == pytest.approx(expected, rel=1e-12)
    for refused, losses in pool.run(2, custom_loop, sizes, False, call):
        assert losses == []
        assert refused == (
            f"In the first {call}, rank 1 has another batch than rank 0, which belongs to the same replica (dp 0); "
            "give all ranks of a replica the same rows, with DistributedSampler(data, num_replicas=1, "
            "rank=mesh.dp.index) instead of one of all 2 ranks, and a data set that does not shard itself by rank."
        )


def test_only_the_first_batch_is_compared(pool: WorkerPool) -> None:
    assert pool.run(2, extra_collectives) == [[1, 0, 0]] * 2


def extra_collectives() -> list[int]:
    """Collectives over the world of three steps, beyond those of the third."""
    mesh = t3.init_mesh(tp=2)
    model = t3.parallelize(layers(), mesh=mesh)
    counts = list[int]()
    original = Axis.all_reduce_

    def counting(axis: Axis, *args: Any) -> torch.Tensor:
        counts[-1] += axis is mesh.world
        return original(axis, *args)

    with patch.object(Axis, "all_reduce_", counting):
        for _ in range(3):
            counts.append(0)
            model.train_batch((torch.ones(2, 4), torch.ones(2, 1)), loss_of)
            model.has_gradients = False
    return [count - counts[-1] for count in counts]


def loader_of(kind: str, sharded: str, augmented: str) -> str:
    mesh = t3.init_mesh()
    data = Rows(sharded=sharded, augmented=augmented)
    if kind == "prepare":
        return sentence(lambda: t3.prepare(DataLoader(data, batch_size=4), mesh=mesh))
    return sentence(lambda: t3.DistributedDataLoader(data, 4, mesh))


@pytest.mark.parametrize("kind", ["prepare", "loader"])
def test_a_data_set_that_shards_itself_is_refused(pool: WorkerPool, kind: str) -> None:
    named = "The data set of the DataLoader" if kind == "prepare" else "dataset, a Rows,"
    ending = (
        ", as a data set that shards itself by rank has, which would be divided twice; give every rank the whole data "
        "set, which is then divided among the replicas."
    )
    found = pool.run(2, loader_of, kind, "strided", "")
    assert found == [f"{named} has another first sample on rank 1 than on rank 0{ending}"] * 2
    found = pool.run(2, loader_of, kind, "uneven", "")
    assert found == [f"{named} has 24 samples on rank 0 and 23 samples on rank 1{ending}"] * 2
    for augmented in ("", "global"):  # what is drawn at random is no other data set
        assert pool.run(2, loader_of, kind, "", augmented) == ["", ""]
    named = named.removesuffix(",")
    for refused in pool.run(2, loader_of, kind, "", "own"):
        assert refused.startswith(
            f"{named}, whose samples draw from own, a numpy.Generator that it keeps, so that each"
        )


def drawn_by_prepare(workers: int, shuffle: bool) -> list[list[float]]:
    """All rows of two passes, by number, as the replicas have them; other draws of the ranks come between."""
    mesh = t3.init_mesh()
    torch.manual_seed(5)
    loader = t3.prepare(DataLoader(Rows(augmented="global"), 8, shuffle=shuffle, num_workers=workers), mesh=mesh)
    found = list[list[float]]()
    for _ in range(2):
        for batch in loader:
            names = [int(name.split()[1]) for name in batch["name"]]
            found += [[number, *row.tolist()] for number, row in zip(names, batch["x"], strict=True)]
            if mesh.rank:
                torch.rand(3)
    return found


def test_what_a_data_set_draws_is_the_same_for_every_number_of_replicas_and_workers(pool: WorkerPool) -> None:
    for shuffle in (False, True):
        (alone,) = pool.run(1, drawn_by_prepare, 0, shuffle)
        assert len({tuple(row) for row in alone}) == 48, "each pass has draws of its own"
        for ranks, workers in ((2, 0), (3, 0), (2, 1)):
            parts = pool.run(ranks, drawn_by_prepare, workers, shuffle)
            assert sorted(row for part in parts for row in part) == sorted(alone), (ranks, workers, shuffle)


def streamed(sharded: bool, workers: int) -> tuple[str, int]:
    model, optimizer = nn.Linear(4, 1), None
    mesh = t3.init_mesh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Stream(sharded), batch_size=8, num_workers=workers)
    model, optimizer, loader = t3.prepare(model, optimizer, loader, mesh=mesh)
    read = 0

    def epoch() -> None:
        nonlocal read
        for x, _ in loader:
            read += len(x)

    return sentence(epoch), read


def test_a_stream_that_shards_itself_is_refused(pool: WorkerPool) -> None:
    assert pool.run(2, streamed, False, 0) == [("", 12), ("", 12)]
    for refused, read in pool.run(2, streamed, True, 0):
        assert refused.startswith("The data set of the DataLoader yields another first batch on rank 1 than on rank 0")
        assert read == 0


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def prepared_forward(differ: bool) -> str:
    mesh = t3.init_mesh(tp=2)
    rules = {"up": t3.Column(), "down": t3.Row()}
    model = t3.prepare(Cut(), mesh=mesh, tensor_parallel=rules)
    rows = torch.ones(2, 4) * (1 + mesh.rank * differ)
    return sentence(lambda: model(rows))


def test_a_prepared_model_cut_over_ranks_compares_its_first_input(pool: WorkerPool) -> None:
    assert pool.run(2, prepared_forward, False) == ["", ""]
    for refused in pool.run(2, prepared_forward, True):
        assert refused.startswith(
            "In the first forward pass, rank 1 has another batch than rank 0, which belongs to the"
        )

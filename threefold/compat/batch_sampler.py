"""Paddle's `paddle.io.DistributedBatchSampler`, for `torch.utils.data.DataLoader(batch_sampler=)`."""

from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from threefold.api.launch import layout_of_ranks
from threefold.errors import UserError, require_whole


class DistributedBatchSampler(Sampler[list[int]]):
    """Batches of the indices of one rank's samples, in Paddle's order.

    The samples are repeated from the first on until they divide by the ranks. The batches go to the ranks in turn, so
    that a step has `num_replicas` consecutive batches; the ranks share those of the last step equally. With `shuffle`,
    the order is drawn from the epoch, which each iteration increases by one.

    The order depends on `num_replicas`. `threefold.GlobalBatchSampler` has one that does not.

    Args:
        dataset: dataset with `__len__`.
        batch_size: samples of a batch of one rank.
        num_replicas: number of ranks with samples of their own; None for all ranks of `torch.distributed`. With tensor
            or pipeline parallelism it is `mesh.dp.size`.
        rank: number of this rank among them; None for its rank in `torch.distributed`, otherwise `mesh.dp.index`.
        shuffle: draw a new order for each epoch.
        drop_last: drop a rank's last batch if it has fewer than `batch_size` samples.

    Attributes:
        epoch: epoch of the next iteration; without `shuffle` it stays.

    Raises:
        UserError: an argument is wrong, or the ranks of one replica would read different samples.

    Example:
        >>> from threefold.compat.paddle import DistributedBatchSampler
        >>> sampler = DistributedBatchSampler(list(range(10)), batch_size=2, num_replicas=2, rank=0)
        >>> list(sampler)
        [[0, 1], [4, 5], [8]]
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
    ) -> None:
        kind = type(dataset).__name__
        if not hasattr(dataset, "__len__") or not len(dataset):
            raise UserError(f"dataset is a {kind} without samples or __len__; give a data set with at least 1 sample.")
        require_whole("batch_size", batch_size)
        for name, value in (("shuffle", shuffle), ("drop_last", drop_last)):
            if not isinstance(value, bool):
                raise UserError(f"{name} is {value!r} but must be True or False; use {name}=False.")
        self.dataset, self.batch_size, self.shuffle, self.drop_last = dataset, batch_size, shuffle, drop_last
        self.nranks = _replicas() if num_replicas is None else _whole("num_replicas", num_replicas, 1)
        default = dist.get_rank() if dist.is_initialized() else 0
        self.local_rank = default if rank is None else _whole("rank", rank, 0)
        if self.local_rank >= self.nranks:
            raise UserError(
                f"rank is {self.local_rank} but num_replicas is {self.nranks}, whose ranks are 0 to "
                f"{self.nranks - 1}; use mesh.dp.index and mesh.dp.size."
            )
        self.num_samples = -(-len(dataset) // self.nranks)
        self.total_size = self.num_samples * self.nranks
        self.epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(islice(cycle(range(len(self.dataset))), self.total_size))
        if self.shuffle:
            np.random.RandomState(self.epoch).shuffle(indices)
            self.epoch += 1
        step = self.batch_size * self.nranks
        for start in range(0, self.total_size, step):
            size = min(self.batch_size, (self.total_size - start) // self.nranks)
            if size < self.batch_size and self.drop_last:
                return
            first = start + self.local_rank * size
            yield indices[first : first + size]

    def __len__(self) -> int:
        """Return the number of batches of an epoch, the same on every rank."""
        return self.num_samples // self.batch_size if self.drop_last else -(-self.num_samples // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from which `shuffle` draws the order of the next iteration."""
        self.epoch = epoch


def _whole(name: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = repr(value) if isinstance(value, int | float | str) else f"a {type(value).__name__}"
        of_mesh = "mesh.dp.size" if name == "num_replicas" else "mesh.dp.index"
        raise UserError(
            f"{name} is {kind} but must be a whole number of at least {least}; use {of_mesh}, or "
            "threefold.GlobalBatchSampler(dataset, global_batch_size, mesh)."
        )
    return value


def _replicas() -> int:
    if not dist.is_initialized():
        return 1
    size, layout = dist.get_world_size(), layout_of_ranks()
    if layout is not None and not layout.startswith(f"dp {size} "):
        raise UserError(
            f"num_replicas is not given, so each of the {size} ranks would read its own samples, but the mesh is "
            f"{layout}, in which ranks share them; give num_replicas=mesh.dp.size and rank=mesh.dp.index."
        )
    return size

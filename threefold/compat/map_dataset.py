"""Batches of any map-style `torch.utils.data.Dataset`, in an order that does not depend on the layout.

The n-th global batch of an epoch is a slice of the keyed permutation of (seed, epoch). Each data-parallel replica
takes a contiguous block of its rows.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Generator
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from threefold.data.keyed_reading import KeyedReader, pass_key
from threefold.data.loader import BatchSlice
from threefold.errors import UserError
from threefold.random import KeyedPermutation
from threefold.resilience.data_agreement import require_one_data_set

if TYPE_CHECKING:
    from threefold.comm.mesh import Mesh


class GlobalBatchSampler(Sampler[list[int]]):
    """Indices of this replica's samples in each global batch, for `torch.utils.data.DataLoader(batch_sampler=)`.

    Iterating yields the batches left in the current epoch, from `start` samples on; call `advance` after a global batch
    is used. A replica has `global_batch_size / dp` indices in each batch. Making it is collective over the mesh, whose
    ranks must have the same data set: each compares its length and its first sample. What a data set draws at random
    follows from the seed in a `DistributedDataLoader` only.

    Args:
        dataset: map-style dataset, with `__len__` and `__getitem__`.
        global_batch_size: samples per step, over all replicas; a multiple of dp.
        mesh: mesh whose `dp` axis the samples are divided over; None for one replica.
        seed: key of each epoch's order.
        shuffle: False keeps the order of the dataset, as for evaluation.
        drop_last: drop the samples at the end of an epoch that do not fill a global batch; otherwise the last batch is
            filled with the first samples of the same epoch, so that each epoch has every sample.

    Attributes:
        epoch: epoch of the next batch.
        start: samples of the epoch used before the next batch.

    Raises:
        UserError: the dataset is not map-style, has too few samples, is another on another rank or at another reading,
            or the batch does not divide by dp.

    Example:
        >>> sampler = threefold.GlobalBatchSampler(dataset, global_batch_size=64, mesh=mesh, seed=0)
        >>> for batch in torch.utils.data.DataLoader(dataset, batch_sampler=sampler):
        ...     sampler.advance()
        >>> sampler.begin_next_epoch()
        True
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int,
        mesh: "Mesh | None" = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        kind = type(dataset).__name__
        if isinstance(dataset, IterableDataset):
            raise UserError(
                f"dataset is a {kind}, an IterableDataset, whose order cannot be keyed by a seed nor resumed; give a "
                "map-style data set, with __len__ and __getitem__."
            )
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UserError(f"dataset is a {kind} but must be of map style; give one with __len__ and __getitem__.")
        require_one_data_set(dataset, mesh, f"dataset, a {kind},")
        if not len(dataset):
            raise UserError(f"dataset is a {kind} without a sample; give one with at least 1.")
        self.samples = len(dataset)
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        index, replicas = (0, 1) if mesh is None else (mesh.dp.index, mesh.dp.size)
        size: Any = global_batch_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise UserError(
                f"global_batch_size is {size!r} but must be a whole number of samples; use "
                f"global_batch_size={replicas}."
            )
        if size % replicas:
            nearest = max(1, round(size / replicas)) * replicas
            raise UserError(
                f"global_batch_size is {size} but must be a multiple of dp {replicas}; use global_batch_size={nearest}."
            )
        self.slice = BatchSlice(global_batch_size, index, replicas)
        if drop_last and self.samples < global_batch_size:
            raise UserError(
                f"The data set has {self.samples} samples, fewer than global_batch_size {global_batch_size}, so with "
                "drop_last an epoch has no batch; use drop_last=False, which fills it."
            )
        self.epoch = self.start = 0

    @property
    def global_batch_size(self) -> int:
        return self.slice.global_batch_size

    def __len__(self) -> int:
        """Return the number of global batches in a whole epoch, the same on every rank."""
        return self.batches_after(0)

    def batches_after(self, start: int) -> int:
        """Return the number of global batches in an epoch after its first `start` samples."""
        left = max(0, self.samples - start)
        return left // self.global_batch_size if self.drop_last else -(-left // self.global_batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, start = self.epoch, self.start
        batches = self.batches_after(start)
        return (self.indices(epoch, start + batch * self.global_batch_size) for batch in range(batches))

    def indices(self, epoch: int, start: int) -> list[int]:
        """Return this replica's samples in the global batch that begins after `start` samples of an epoch."""
        places = (start + self.slice.rows) % self.samples
        if self.shuffle:
            places = KeyedPermutation(self.samples, self.seed, epoch)(places)
        return [int(place) for place in np.asarray(places)]

    def advance(self) -> None:
        """Record that the next global batch was used."""
        self.start += self.global_batch_size

    def begin_next_epoch(self) -> bool:
        """Go to the next epoch if no batch is left in this one; return whether it did."""
        if self.batches_after(self.start):
            return False
        self.epoch, self.start = self.epoch + 1, 0
        return True

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data, which is the same on every rank and for every dp and batch size."""
        return {"epoch": self.epoch, "start": self.start, "seed": self.seed, "samples": self.samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a saved state, which may come from another dp or batch size.

        Raises:
            UserError: it is not the state of a sampler, or its dataset size or seed differs.
        """
        for name in self.state_dict():
            if name not in state:
                raise UserError(f"The state of a sampler lacks {name!r}; give what `state_dict` returned.")
        if state["samples"] != self.samples:
            raise UserError(
                f"The state is of a data set of {state['samples']} samples but this one has {self.samples}; give the "
                "data set it was saved with."
            )
        if state["seed"] != self.seed:
            raise UserError(
                f"The state is of seed {state['seed']} but the sampler has seed {self.seed}, so it would read samples "
                f"twice; use seed={state['seed']}."
            )
        self.epoch, self.start = state["epoch"], state["start"]
        self.begin_next_epoch()


class DistributedDataLoader:
    """Batches of this rank from any map-style dataset, in an order that does not depend on the layout.

    `for batch in loader` yields the batches left in the current epoch; the next loop has the next epoch. A loop that is
    left early is continued by the next one. What the dataset draws from the global generators of torch, NumPy and
    random, such as an augmentation, follows from `seed`, the epoch and the sample; a dataset that keeps a generator or
    a counter of its own is refused. Making it is collective over the mesh.

    Args:
        dataset: map-style dataset, with `__len__` and `__getitem__`.
        global_batch_size: samples per step, over all replicas; a multiple of dp.
        mesh: mesh whose `dp` axis the samples are divided over; None for one replica.
        seed: key of each epoch's order.
        shuffle: False keeps the order of the dataset.
        drop_last: drop the samples at the end of an epoch that do not fill a global batch, as in
            `GlobalBatchSampler`.
        num_workers: processes that read ahead, as in `torch.utils.data.DataLoader`; 0 for none.
        collate_fn: makes a batch from a list of samples; None uses torch's.
        options: further arguments of `torch.utils.data.DataLoader`, such as `pin_memory` or `persistent_workers`.

    Raises:
        UserError: as in `GlobalBatchSampler`.

    Example:
        >>> loader = threefold.DistributedDataLoader(dataset, global_batch_size=64, mesh=mesh, seed=0)
        >>> for epoch in range(loader.epoch, 3):
        ...     for batch in loader:
        ...         ...
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int,
        mesh: "Mesh | None" = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        for name in ("batch_size", "sampler", "batch_sampler"):
            if name in options:
                raise UserError(f"{name} follows from global_batch_size, mesh and seed; leave it out.")
        self.dataset = dataset
        self.sampler = GlobalBatchSampler(
            dataset, global_batch_size, mesh, seed=seed, shuffle=shuffle, drop_last=drop_last
        )
        self._loader: DataLoader[Any] = DataLoader(
            _KeyedDataset(dataset),
            batch_sampler=_KeyedBatches(self.sampler),
            num_workers=num_workers,
            collate_fn=collate_fn,
            generator=Generator(),  # otherwise each epoch draws from torch's default generator
            **options,
        )

    @property
    def epoch(self) -> int:
        """Epoch of the last batch that was returned, or of the next one before a loop."""
        return self.sampler.epoch

    @property
    def consumed_samples(self) -> int:
        """Samples returned to all replicas since the first epoch began, if each epoch had batches of this size.

        Those that fill the last batch of an epoch count, and those that `drop_last` leaves out do not. After a resume
        with another batch size, the epochs before are therefore counted as this size would have made them.
        """
        sampler = self.sampler
        return sampler.epoch * len(sampler) * sampler.global_batch_size + sampler.start

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, the same on every rank."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self.sampler.begin_next_epoch()
        with sentences_of_workers():
            for batch in self._loader:
                self.sampler.advance()  # before the batch is used, so that a checkpoint after the step counts it
                yield batch
        self.sampler.begin_next_epoch()

    def set_epoch(self, epoch: int) -> None:
        """Start the next loop at the first batch of an epoch."""
        self.sampler.epoch, self.sampler.start = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch that was returned, however far the workers have read ahead."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after the last batch that another loader returned, which may have had another dp.

        Raises:
            UserError: as in `GlobalBatchSampler.load_state_dict`.
        """
        self.sampler.load_state_dict(state)


@contextmanager
def sentences_of_workers() -> Iterator[None]:
    """Raise a `UserError` of a worker process of torch's `DataLoader`, which adds its traceback, as it was raised."""
    try:
        yield
    except UserError as error:
        if "Original Traceback" not in str(error):
            raise
        raise UserError(str(error).strip().splitlines()[-1].partition(": ")[2]) from None


class _KeyedBatches(Sampler[list[tuple[int, int]]]):
    """Batches of a sampler, with the key of the epoch beside each index."""

    def __init__(self, sampler: GlobalBatchSampler) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        key = pass_key(self._sampler.seed, self._sampler.epoch)
        return ([(index, key) for index in batch] for batch in self._sampler)


class _KeyedDataset(Dataset[Any]):
    """Data set whose samples are read under keys, by pairs of an index and a key."""

    def __init__(self, dataset: Any) -> None:
        self.reader = KeyedReader(dataset, f"dataset, a {type(dataset).__name__}")

    def __len__(self) -> int:
        return len(self.reader.dataset)

    def __getitem__(self, place: tuple[int, int]) -> Any:
        return self.__getitems__([place])[0]

    def __getitems__(self, places: list[tuple[int, int]]) -> list[Any]:
        numbers, keys = zip(*places, strict=True)
        return self.reader.read(numbers, keys)

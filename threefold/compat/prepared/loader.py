"""Prepared data loaders: each replica's rows of a global batch, and gathering of values for metrics."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from torch import Generator, Tensor, default_generator
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from threefold.comm.mesh import Mesh
from threefold.compat.map_dataset import sentences_of_workers
from threefold.data.keyed_reading import KeyedReader, fingerprint_of
from threefold.errors import UserError
from threefold.resilience.data_agreement import require_one_data_set, require_one_stream


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor of a nested value (tuples, lists, mappings and dataclasses), in order."""
    if isinstance(value, Tensor):
        yield value
        return
    parts: Iterable[Any] = value if isinstance(value, list | tuple) else ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        parts = (getattr(value, field.name) for field in fields(value))
    for each in parts:
        yield from tensors_in(each)


def map_tensors(value: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested value with each tensor replaced by `make(tensor)`; anything else is kept as it is."""
    if isinstance(value, Tensor):
        return make(value)
    if isinstance(value, MutableMapping):
        made = copy(value)
        for key, each in value.items():
            made[key] = map_tensors(each, make)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(each, make) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(each, make) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        fresh: Any = copy(value)
        for field in fields(value):
            object.__setattr__(fresh, field.name, map_tensors(getattr(value, field.name), make))
        return fresh
    return value


_BATCHES_AT_ONCE = 4096
"""Number of batches whose indices the first rank sends in one message."""


class BatchRows(NamedTuple):
    """One replica's rows of a global batch, and whether it is the loader's last.

    A batch may have fewer rows than there are replicas: one with 0 `local` rows repeats the row of another as a filler,
    which is ignored.
    """

    local: int
    total: int
    last: bool = False
    content: int = 0  # fingerprint of the whole batch, of the first one of an iterable data set
    key: int = 0  # of what the samples of a map-style data set draw at random


@dataclass
class CurrentBatch:
    """Batch that a prepared loader yielded last; None before the first and after the last."""

    rows: BatchRows | None = None

    @property
    def is_filler(self) -> bool:
        """Whether this replica's only row is a filler."""
        return self.rows is not None and self.rows.local == 0


class PreparedLoader:
    """A `DataLoader` returned by `prepare`; each iteration yields this replica's rows of the next global batch.

    A global batch is the batch that the `DataLoader` would yield on one process. Rank 0 sends the indices that its
    sampler draws to all ranks, so the order depends only on the seed of rank 0, not on the number of replicas. Rows are
    divided as evenly as possible, in order. If a batch has fewer rows than there are replicas, like the last of an
    epoch, some replicas get a filler row, so that all run the model equally often; `backward` and `gather_for_metrics`
    ignore it.

    What a map-style data set draws from the global generators of torch, NumPy and random follows from the pass and the
    sample, in any layout and with any workers; one that keeps a generator or a counter of its own is refused.

    An `IterableDataset` is read by every rank, which keeps its own rows; it must yield the same on all ranks. Ranks
    compare the first batch, and the length and the first sample of a map-style data set.

    Attributes:
        loader: the original; its other attributes can be read from this object as well.
    """

    def __init__(self, loader: DataLoader, mesh: Mesh, current: CurrentBatch) -> None:
        if loader.batch_size is None and loader.batch_sampler is None:
            raise UserError(
                "The DataLoader has batch_size=None, so that its batches cannot be divided among replicas; give it a "
                "batch_size."
            )
        if any(isinstance(each, DistributedSampler) for each in (loader.sampler, loader.batch_sampler)):
            raise UserError(
                "The DataLoader has a DistributedSampler, which would divide its batches a second time; make it with "
                "shuffle=True or another sampler instead."
            )
        self.loader, self.mesh, self.currents = loader, mesh, [current]
        self.rows: BatchRows | None = None
        self._is_compared = mesh.world.size == 1 or not isinstance(loader.dataset, IterableDataset)
        # A loader with the same data set, workers and collation that reads this replica's parts.
        kept = "num_workers pin_memory timeout worker_init_fn multiprocessing_context generator persistent_workers"
        options: dict[str, Any] = {name: getattr(loader, name) for name in kept.split()}
        if loader.num_workers:
            options["prefetch_factor"] = loader.prefetch_factor
        parts: Any
        if isinstance(loader.dataset, IterableDataset):
            assert loader.batch_size is not None  # a batch_sampler and an IterableDataset exclude each other
            parts = _StreamOfParts(loader.dataset, loader.batch_size, loader.drop_last, mesh.dp.index, mesh.dp.size)
        else:
            assert loader.batch_sampler is not None  # checked
            require_one_data_set(loader.dataset, mesh, "The data set of the DataLoader")
            parts = _DatasetOfParts(loader.dataset)
            options["sampler"] = _PartSampler(loader.batch_sampler, mesh, loader.generator)
        collate: Any = partial(_collated, loader.collate_fn)
        self._inner: DataLoader = DataLoader(parts, batch_size=None, collate_fn=collate, **options)

    def __len__(self) -> int:
        """Return the number of batches of an epoch, the same as on one process."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        device, arriving = self.mesh.device, self._arriving()
        ahead = next(arriving, None)
        if not self._is_compared:
            self._is_compared = True
            require_one_stream(0 if ahead is None else ahead[0].content, self.mesh)
        try:
            while ahead is not None:
                (rows, batch), ahead = ahead, next(arriving, None)
                self.rows = rows._replace(last=ahead is None)
                for current in self.currents:
                    current.rows = self.rows
                moves = device.type != "cpu"
                yield map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True)) if moves else batch
        finally:
            for current in self.currents:
                current.rows = None

    def _arriving(self) -> Iterator[tuple[BatchRows, Any]]:
        with sentences_of_workers():
            yield from self._inner

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet, as during copying
            raise AttributeError(name)
        return getattr(self.loader, name)


def gather_for_metrics(values: Any, loader: Any) -> Any:
    """Gather the values of all rows of the current global batch, in its order, on every rank.

    Filler rows are left out, so each sample is counted once. Collective over the replicas.

    Args:
        values: a tensor [rows, …] of this replica's rows, such as predictions or labels; or a tuple, list or mapping of
            such tensors.
        loader: prepared loader that yielded the rows.

    Returns:
        the same structure with tensors [rows of the global batch, …].

    Raises:
        UserError: the loader is not prepared, or a tensor does not have one value per row.

    Example:
        ```python
        for x, y in valid_loader:
            predicted, labels = t3.gather_for_metrics((model(x).argmax(-1), y), valid_loader)
            correct += (predicted == labels).sum()
        ```
    """
    if not isinstance(loader, PreparedLoader):
        raise UserError(
            f"loader is of the type {type(loader).__name__} but gather_for_metrics needs the one that prepare returned."
        )
    rows, axis = loader.rows, loader.mesh.dp
    if rows is None:
        raise UserError(
            "gather_for_metrics was called before the loader yielded a batch; call it inside the loop over it."
        )
    local, held = rows.local, max(rows.local, 1)

    def gathered(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != held:
            raise UserError(
                f"A tensor of shape {[*tensor.shape]} does not have one value for each of the replica's {held} rows; "
                "pass values by row, such as losses with reduction='none'."
            )
        return axis.all_gather(tensor.detach()[:local].contiguous(), dim=0)

    return map_tensors(values, gathered)


_Part = tuple[BatchRows, Sequence[Any]]
"""A replica's part of a batch: indices into the dataset, or the items themselves."""


def _part(batch: Sequence[Any], index: int, replicas: int, content: int = 0, key: int = 0) -> _Part:
    total = len(batch)
    local = batch[total * index // replicas : total * (index + 1) // replicas]
    return BatchRows(len(local), total, content=content, key=key), local or batch[:1]


class _PartSampler:
    """Sampler of this replica's part of each batch that the sampler of rank 0 draws.

    Where rank 0's `generator` (None for torch's global one) is at the beginning of a pass, which decides the order of a
    shuffled pass, also decides what its samples draw at random.
    """

    def __init__(self, batches: Iterable[Sequence[Any]], mesh: Mesh, generator: Generator | None) -> None:
        self._batches, self._mesh, self._generator = batches, mesh, generator or default_generator

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # needed only where the loader has a length

    def __iter__(self) -> Iterator[_Part]:
        mesh = self._mesh
        key = fingerprint_of(self._generator.get_state())
        source = iter(self._batches) if mesh.rank == 0 else iter(())
        while True:
            drawn = [list(batch) for batch in islice(source, _BATCHES_AT_ONCE)]
            key, drawn = mesh.world.gather_objects((key, drawn))[0]
            for batch in drawn:
                if batch:
                    yield _part(batch, mesh.dp.index, mesh.dp.size, key=key)
            if len(drawn) < _BATCHES_AT_ONCE:
                return


class _DatasetOfParts(Dataset[_Part]):
    """Dataset indexed by a replica's part of a batch."""

    def __init__(self, dataset: Any) -> None:
        self.reader = KeyedReader(dataset, "The data set of the DataLoader")

    def __getitem__(self, part: _Part) -> _Part:
        rows, indices = part
        return rows, self.reader.read(indices, [rows.key] * len(indices))


class _StreamOfParts(IterableDataset[_Part]):
    """Stream of this replica's part of each batch of an iterable dataset."""

    def __init__(self, dataset: Any, batch_size: int, drop_last: bool, index: int, replicas: int) -> None:
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.index, self.replicas = index, replicas

    def __iter__(self) -> Iterator[_Part]:
        source, is_first = iter(self.dataset), True
        while batch := list(islice(source, self.batch_size)):
            if len(batch) < self.batch_size and self.drop_last:
                return
            yield _part(batch, self.index, self.replicas, fingerprint_of(batch) if is_first else 0)
            is_first = False


def _collated(collate: Callable[[Any], Any], part: _Part) -> tuple[BatchRows, Any]:
    rows, items = part
    return rows, collate(items)

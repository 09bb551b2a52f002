"""The data loader: a rank's rows of every global batch, prefetched one step ahead.

The samples of a step follow from the seed and the samples consumed before it. So resuming needs no sampler state.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from threefold.config.by_step import parts_by_step, value_at
from threefold.constants import IGNORE_INDEX
from threefold.data.formats.custom_data import NestedSamples
from threefold.data.keyed_reading import pass_key, positions
from threefold.data.order import ConsumedSamples, Standing
from threefold.data.samples import MixturePart, Samples
from threefold.random import Int64Array


@dataclass(frozen=True, eq=False)
class Batch:
    """One rank's rows of a global batch; tensors are int64 where nothing else is said."""

    tokens: torch.Tensor  # [rows, S], the inputs
    labels: torch.Tensor  # [rows, S], the next token of each; ignored labels are -100 (IGNORE_INDEX)
    rows: torch.Tensor  # [rows], index of each row in the global batch
    documents: torch.Tensor | None = None  # [rows, S], of each token if the attention mask separates documents
    positions: torch.Tensor | None = None  # [rows, S], of each token if positions restart with each document
    padding: torch.Tensor | None = None  # [rows], number of padding tokens of each row
    references: torch.Tensor | None = None  # fp64 [rows, 2], `Samples.references`


@dataclass(frozen=True)
class BatchSlice:
    """A data-parallel rank's slice of the global batch: a contiguous block of its rows.

    Where the batch size changes by step, the slice is of a batch of the largest size, as evaluations read.
    """

    global_batch_size: int
    dp_index: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        size, index, dp = self.global_batch_size, self.dp_index, self.dp_size
        if size < 1 or size % dp or not 0 <= index < dp:
            raise ValueError(f"a global batch of {size} rows has no slice {index} of {dp}")

    @property
    def rows(self) -> Int64Array:
        """This rank's rows of the global batch, int64 [global_batch_size / dp_size]."""
        local = self.global_batch_size // self.dp_size
        return np.arange(self.dp_index * local, (self.dp_index + 1) * local, dtype=np.int64)


class Loader:
    """Batches of one data-parallel rank, for any step; the next one is prefetched.

    A batch is a `Batch` of tokens. For samples that are nestings of tensors, it is the nesting of this rank's rows.

    `heldout` are the samples to evaluate on. `seed` is the key of the order of training samples. Batches have the
    document of each token if `separate_documents`, and pinned memory, for asynchronous copies to a GPU, if `pinned`.
    `consumed` is set on resume, before the first batch.
    """

    def __init__(
        self,
        train: Samples,
        heldout: Samples | None,
        part: BatchSlice,
        seed: int,
        separate_documents: bool = False,
        pinned: bool = False,
        length: int = 1,
    ) -> None:
        self._lengths, (self._read, self.parts) = length, parts_by_step(part.global_batch_size, length)
        self.train, self.heldout, self.slice, self.seed = train, heldout, part, seed
        self.separate_documents, self.pinned = separate_documents, pinned
        self._is_custom = train.draws is not None  # samples that code of the user reads
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="threefold-data")
        self._ahead: dict[int, Callable[[], Any]] = {}
        self.consumed = ConsumedSamples(self._read)
        self._has_drawn = self._may_read_ahead = False  # of custom samples, the first of which are read under keys

    @property
    def consumed(self) -> ConsumedSamples:
        """Training samples consumed before each step; setting it begins to read there."""
        return self._consumed

    @consumed.setter
    def consumed(self, consumed: ConsumedSamples) -> None:
        self._consumed, self._ahead = consumed, {}
        self.train = self.train.begun(consumed)

    def blend(self, step: int) -> Standing:
        """Return where each corpus of a mixture stands before `step`, from which a resumed run reads on."""
        return self.train.standing(self.consumed.before(step))

    @property
    def is_nested(self) -> bool:
        """Whether the samples are nestings of tensors instead of tokens."""
        return isinstance(self.train, NestedSamples)

    def batch(self, step: int, following: int | None = None) -> Any:
        """Return the training batch of `step` (from 0), and prefetch the batch of `following`, by default the next."""
        following = step + 1 if following is None else following
        ahead = self._ahead.pop(step, None)
        batch = self._now(partial(self._read_train, step)) if ahead is None else ahead()
        self._ahead = {following: self._in_background(partial(self._read_train, following))}
        return batch

    def _in_background(self, read: Callable[[bool], Any]) -> Callable[[], Any]:
        """Start reading a batch; return a function that waits for it.

        While the main thread computes, which may draw random numbers itself, custom samples are not read under keys.
        Where a global generator moves meanwhile, the batch is read again by the main thread, and so are all later ones.
        """
        if not self._is_custom:
            return self._reader.submit(read, False).result
        if not self._may_read_ahead:
            return lambda: self._now(read)
        reading = self._reader.submit(_undrawn, partial(read, False))

        def wait() -> Any:
            if (batch := reading.result()) is not None:
                return batch
            self._has_drawn = True
            return self._now(read)

        return wait

    def _now(self, read: Callable[[bool], Any]) -> Any:
        batch = read(self._is_custom)
        parts = (self.train, self.heldout)
        self._has_drawn = self._has_drawn or any(part is not None and part.draws for part in parts)
        self._may_read_ahead = not self._has_drawn
        return batch

    def sample_indices(self, step: int) -> Int64Array:
        """Return the training samples that are this rank's rows in the batch of `step` (from 0): int64 [rows]."""
        return self._indices(step)[0]

    def _indices(self, step: int) -> tuple[Int64Array, Int64Array]:
        """Return this rank's samples in the batch of `step`, cut to its length, and the counters of the whole ones."""
        ratio = self._ratio(step)
        each = self.parts // ratio
        counters = (self.consumed.before(step) + self.rows(step) * each) // each
        whole = counters // ratio
        return self.train.ordered(whole, self.seed) * ratio + counters % ratio, whole

    def _ratio(self, step: int) -> int:
        """Return the ratio of the largest length of a sample to that of `step`, into as many of which it is cut."""
        ratio: int = int(self._lengths) // value_at(self._lengths, step)
        return ratio

    def rows(self, step: int) -> Int64Array:
        """Return this rank's rows of the global batch of `step` (from 0), int64 [rows]."""
        return replace(self.slice, global_batch_size=value_at(self.slice.global_batch_size, step)).rows

    def sample_name(self, index: int) -> str:
        """Name a training sample: its number, or in a mixture its number in its corpus and the corpus's name."""
        for part in self.train.parts if len(self.train.parts) > 1 else ():
            if index < len(part.samples):
                return f"{index} of {part.name}"
            index -= len(part.samples)
        return str(index)

    def of_replica(self, index: int) -> "Loader":
        """Return a loader of another replica's rows of the same batches; it is closed with this one."""
        other = copy(self)
        other.slice, other._ahead = replace(self.slice, dp_index=index), {}
        return other

    def epoch(self, step: int) -> float:
        """Return the passes over the training samples completed before `step`, as a fraction."""
        return self.consumed.before(step) / self.epoch_size

    @property
    def epoch_size(self) -> int:
        """Parts (`config.by_step.parts_by_step`) of the training samples."""
        return len(self.train) * self.parts

    def corpus_epochs(self, step: int) -> dict[str, float]:
        """Return the passes over each corpus of a mixture completed before `step`, by name; empty without a mixture."""
        return self.train.epochs(self.consumed.before(step))

    @property
    def is_mixture(self) -> bool:
        return len(self._heldout_samples().parts) > 1

    def eval_parts(self, limit: int | None = None) -> list[tuple[MixturePart, int]]:
        """Return the held-out corpora, and how many batches of each to evaluate if `limit` are allowed; None for all.

        They share the batches by weight, but each gets at least one and at most as many as it has.
        """
        parts = self._heldout_samples().parts
        counts = [max(1, round(part.weight * limit)) if limit else None for part in parts]
        return [(part, self.eval_batch_count(count, part.samples)) for part, count in zip(parts, counts, strict=True)]

    def eval_batches(self, limit: int | None = None, of: Samples | None = None) -> Iterator[Any]:
        """Yield the first `limit` held-out batches (None or 0: all), in file order, always the same.

        `of` gives the samples of a single part to evaluate; None evaluates all.

        Every rank yields the same number of batches. The last one is filled up with rows whose labels are all -100. So
        a loss weighted by valid tokens is the mean over the split, and no rank waits for one that has finished. A batch
        of nestings of tensors is filled up with the first samples, which then count twice.
        """
        samples = self._heldout_samples() if of is None else of
        count = self.eval_batch_count(limit, samples)
        ahead = self._in_background(partial(self._read_heldout, samples, 0))
        for i in range(count):
            batch = ahead()
            if i + 1 < count:
                ahead = self._in_background(partial(self._read_heldout, samples, i + 1))
            yield batch

    def eval_batch_count(self, limit: int | None = None, of: Samples | None = None) -> int:
        """Return the number of batches that `eval_batches(limit, of)` yields, capped at the number available."""
        samples = self._heldout_samples() if of is None else of
        whole = -(-len(samples) // self.slice.global_batch_size)
        return min(limit, whole) if limit else whole

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _read_train(self, step: int, keyed: bool = False) -> Any:
        indices, counters = self._indices(step)
        keys = self._keys(self.train.passes(counters)) if keyed else None
        ratio = self._ratio(step)
        return self._make_batch(self.train if ratio == 1 else self.train.cut(ratio), indices, self.rows(step), keys)

    def _read_heldout(self, samples: Samples, number: int, keyed: bool) -> Any:
        indices = number * self.slice.global_batch_size + self.slice.rows
        keys = self._keys(np.zeros_like(indices)) if keyed else None
        if isinstance(samples, NestedSamples):
            return samples.batch(indices % len(samples), keys)
        past_end = indices >= len(samples)
        return self._make_batch(samples, np.where(past_end, 0, indices), self.slice.rows, keys, past_end)

    def _keys(self, passes: Int64Array) -> Int64Array:
        return np.array([pass_key(self.seed, number) for number in passes.tolist()])

    def _make_batch(
        self,
        samples: Samples,
        indices: Int64Array,
        rows: Int64Array,
        keys: Int64Array | None,
        ignored: NDArray[np.bool_] | None = None,
    ) -> Any:
        if isinstance(samples, NestedSamples):
            return samples.batch(indices, keys)
        tokens, labels = (np.ascontiguousarray(part) for part in samples.labelled(indices, keys))
        if ignored is not None:
            labels[ignored] = IGNORE_INDEX
        documents = samples.documents(indices) if self.separate_documents else None
        positions = samples.positions(indices) if self.separate_documents else None
        arrays = (tokens, labels, rows, documents, positions, samples.padding(indices), samples.references(indices))
        parts: list[Any] = [None if array is None else torch.from_numpy(array) for array in arrays]
        return Batch(*(part.pin_memory() if self.pinned and part is not None else part for part in parts))

    def _heldout_samples(self) -> Samples:
        if self.heldout is None:
            raise ValueError("this loader was made without held-out samples")
        return self.heldout


def _undrawn(read: Callable[[], Any]) -> Any:
    """Read a batch; None if a global generator moves meanwhile, which may have decided what was read."""
    before = positions()
    batch = read()
    return batch if positions() == before else None

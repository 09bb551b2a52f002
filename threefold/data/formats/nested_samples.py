"""Samples of any nesting of tensors, in the keyed order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import default_collate

from threefold.data.samples import MixturePart, Samples
from threefold.errors import UserError
from threefold.files import shown, told
from threefold.random import Int64Array, samples_at


@dataclass(frozen=True, eq=False)
class NestedSamples:
    """Samples of one split of a dataset, batched as by `torch.utils.data.DataLoader`.

    Attributes:
        path: import path of the dataset.
        part: the dataset.
        chosen: int64 [samples], the samples of the split, as indices in the dataset.
    """

    path: str
    part: Any
    chosen: Int64Array

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def parts(self) -> tuple[MixturePart, ...]:
        return (MixturePart("", cast(Samples, self), 1.0),)

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def ordered(self, counters: Int64Array, seed: int) -> Int64Array:
        return samples_at(counters, len(self), seed)

    def epochs(self, counter: int) -> dict[str, float]:
        return {}

    def batch(self, indices: Int64Array) -> Any:
        """Collate samples into one nesting, in which every leaf is a tensor with a batch dim (dim 0).

        Raises:
            UserError: a sample cannot be read, holds something other than tensors, arrays and numbers, or differs in
                shape.
        """
        numbers = [int(number) for number in self.chosen[indices]]
        samples = [self._read(number) for number in numbers]
        try:
            for number, sample in zip(numbers[1:], samples[1:], strict=True):
                _check_keys(sample, samples[0], number, numbers[0])
            batch = default_collate(samples)
        except Exception as error:
            raise UserError(
                f"data.path is {shown(self.path)}, whose samples {', '.join(map(str, numbers[:3]))}, … cannot be "
                f"put into one batch ({told(error)}); give all the same nesting, keys and shapes, padded say."
            ) from error
        if kind := _wrong_leaf(batch):
            raise UserError(
                f"data.path is {shown(self.path)}, whose sample {numbers[0]:,} has a {kind} in it but must be "
                "tensors, arrays and numbers, or tuples, lists and mappings of these; make it a tensor."
            )
        return batch

    def _read(self, number: int) -> Any:
        try:
            return self.part[number]
        except Exception as error:
            raise UserError(
                f"data.path is {shown(self.path)}, whose sample {number:,} cannot be read ({told(error)}); "
                "correct its __getitem__."
            ) from error


def _check_keys(sample: Any, first: Any, number: int, first_number: int) -> None:
    """Raise ValueError if a sample has a key that the first one lacks: `default_collate` only uses the first's keys."""
    if isinstance(sample, Mapping) and isinstance(first, Mapping):
        if more := [key for key in sample if key not in first]:
            raise ValueError(f"sample {number:,} has {more[0]!r}, and sample {first_number:,} has not")
        for key, value in sample.items():
            _check_keys(value, first[key], number, first_number)
    elif isinstance(sample, tuple | list) and isinstance(first, tuple | list):
        for value, other in zip(sample, first, strict=False):
            _check_keys(value, other, number, first_number)


def _wrong_leaf(batch: Any) -> str | None:
    """Return the type of a leaf of a batch that is not a tensor; None if all leaves are tensors."""
    if isinstance(batch, torch.Tensor):
        return None
    if isinstance(batch, str | bytes) or not isinstance(batch, Mapping | tuple | list):
        return type(batch).__name__
    inside = batch.values() if isinstance(batch, Mapping) else batch
    return next((kind for each in inside if (kind := _wrong_leaf(each))), None)

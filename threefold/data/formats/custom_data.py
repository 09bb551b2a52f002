"""Samples from a custom map-style dataset: tokens, or for a custom model any nesting of tensors and numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from threefold.constants import IGNORE_INDEX
from threefold.data.samples import SPLITS, Samples, document_numbers
from threefold.data.tokenizer import TextRule
from threefold.errors import UserError
from threefold.files import describe_error, first_of, shown
from threefold.plugins import is_import_path, load_path
from threefold.random import Int64Array

if TYPE_CHECKING:
    from threefold.data.keyed_reading import KeyedReader


def named(path: str) -> str:
    """Return the beginning of messages about a user's dataset."""
    return f"data.path is {shown(path)}"


def is_custom_data(path: str) -> bool:
    """Return whether a path in the config is an import path rather than an existing file or folder."""
    return is_import_path(path) and not Path(path).exists()


@dataclass(frozen=True, eq=False)
class CustomData:
    """Dataset at an import path, or made by the function or class there, which is called without arguments.

    A dataset has `__len__` and `__getitem__`. Its samples are divided by `data.split`, unless a mapping with `train`,
    `valid` and `test` is given instead. A sample is one of:

    - a pair (tokens, labels) of sequences of equal length; the label -100 is ignored;
    - a mapping with exactly these two keys;
    - one sequence of tokens, each of which is the label of the one before it.

    Samples shorter than `data.sequence_length` are padded at the end. For a custom model, all other samples are
    nestings of tensors, arrays and numbers of equal shapes; mappings keep all their keys.

    `parts` has datasets by name of the split, or the whole under the empty name. `vocab_size` is 1 if samples are not
    tokens and no setting gives it.
    """

    path: str
    parts: Mapping[str, Any]
    vocab_size: int
    is_nested: bool = False
    eod: None = None
    holds_chat: bool = False
    holds_pairs: bool = False
    template: None = None
    rule: TextRule = field(default_factory=lambda: TextRule(is_assumed=True))
    tokenizer_file: None = None
    tokenizer_sha256: None = None

    @classmethod
    def open(cls, path: str, vocab_size: int | None, for_custom_model: bool = False) -> "CustomData":
        """Load the dataset at an import path; for a custom model, samples may be something other than tokens."""
        parts = _parts(path)
        if for_custom_model and is_nested(path):
            return cls(path, parts, vocab_size or 1, is_nested=True)
        if unknown := _unknown_keys(_first(parts)):
            raise UserError(
                f"{named(path)}, whose samples have {unknown}, which a built-in model does not know; "
                "leave them out, or train a model of your own, which gets all keys."
            )
        if vocab_size is None:
            otherwise = ", or return mappings if its samples are not tokens" if for_custom_model else ""
            raise UserError(
                f"{named(path)}, a data set of tokens that does not say how many ids there are; set "
                f"model.vocab_size{otherwise}."
            )
        return cls(path, parts, vocab_size)

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts.values())

    def samples(self, name: str, split: str, sequence_length: int) -> "TokenSamples | NestedSamples":
        """Return the samples of split `name` ("train", "valid" or "test"). Raises UserError if it is empty."""
        if "" in self.parts:
            part = self.parts[""]
            chosen = document_numbers(len(part), split, name)
            remedy = f'data.split "{split}" gives it none; give it a weight above 0'
        else:
            part = self.parts.get(name, ())
            chosen, remedy = np.arange(len(part)), f"add {name!r} to what it returns"
        if not len(chosen):
            unevaluated = ", or set train.eval_every to 0" if name == "valid" else ""
            raise UserError(f"{named(self.path)}, whose {name} part is empty: {remedy}{unevaluated}.")
        if self.is_nested:
            return NestedSamples(self, chosen.astype(np.int64), part)
        return TokenSamples(self, chosen.astype(np.int64), part, sequence_length)


def is_nested(path: str) -> bool:
    """Return whether a dataset's first sample is not tokens and labels. Raises UserError if there is no dataset."""
    parts = _parts(path)
    if not any(map(len, parts.values())):
        return False
    first = _first(parts)
    try:
        return bool(_unknown_keys(first)) or not _pair(first)
    except Exception:  # not such a pair, or it cannot be read, which reading it for a batch reports
        return True


def _first(parts: Mapping[str, Any]) -> Any:
    """Return the first sample of the datasets; None if there is none, or if reading fails, which is reported later."""
    from threefold.random.rng import fixed_generators

    part = next((part for part in parts.values() if len(part)), None)
    try:
        with fixed_generators("first sample"):
            return None if part is None else part[0]
    except Exception:
        return None


def _unknown_keys(sample: Any) -> str:
    """Name the keys of a sample besides its tokens and labels; empty if there are none."""
    if not isinstance(sample, Mapping) or not {"tokens", "labels"} <= sample.keys():
        return ""
    others = [repr(key) for key in sample if key not in ("tokens", "labels")]
    keys = f"the key{'s' if len(others) > 1 else ''} {first_of(others)}"
    return f"{keys} beside 'tokens' and 'labels'" if others else ""


@dataclass(frozen=True, eq=False)
class _ReadSamples(Samples):
    """Samples of one split of a dataset, which are read under keys."""

    data: CustomData
    chosen: Int64Array  # [samples], their numbers in the data set
    part: Any
    problem: ClassVar[str]  # message about a sample and the error of reading it

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def draws(self) -> bool:
        return self._reader.draws

    @cached_property
    def _reader(self) -> "KeyedReader":
        from threefold.data.keyed_reading import KeyedReader  # imports torch, as below

        return KeyedReader(self.part, named(self.data.path))

    def _read(self, numbers: Sequence[int], keys: Int64Array | None) -> list[Any]:
        reader = self._reader
        try:
            return reader.read_plain(numbers) if keys is None else reader.read(numbers, keys.tolist())
        except UserError:
            raise
        except Exception as error:
            begin = f"{named(self.data.path)}, whose sample {reader.at:,}"
            raise UserError(self.problem.format(begin, describe_error(error))) from error


@dataclass(frozen=True, eq=False)
class TokenSamples(_ReadSamples):
    """Samples of tokens, each padded to `sequence_length`."""

    sequence_length: int
    _lengths: dict[int, int] = field(default_factory=dict)
    """Lengths of the samples that `labelled` read last."""
    problem = (
        "{} cannot be read as tokens and labels ({}); return a pair of equally long sequences of ids, or one sequence."
    )

    def labelled(self, indices: Int64Array, keys: Int64Array | None = None) -> tuple[Int64Array, Int64Array]:
        tokens = np.zeros((len(indices), self.sequence_length), np.int64)
        labels = np.full_like(tokens, IGNORE_INDEX)
        self._lengths.clear()
        numbers = self.chosen[indices].tolist()
        samples = self._read(numbers, keys)
        for row, (index, number, sample) in enumerate(zip(indices, numbers, samples, strict=True)):
            found, following = self._checked(number, sample)
            self._lengths[int(index)] = len(found)
            tokens[row, : len(found)] = found
            labels[row, : len(following)] = following
        return tokens, labels

    def documents(self, indices: Int64Array) -> Int64Array:
        return np.zeros((len(indices), self.sequence_length), np.int64)

    def padding(self, indices: Int64Array) -> Int64Array:
        known = dict(self._lengths)
        if missing := [index for index in indices.tolist() if index not in known]:
            self.labelled(np.array(missing), np.zeros(len(missing), np.int64))
            known |= self._lengths
        return self.sequence_length - np.array([known[index] for index in indices.tolist()], np.int64)

    def _checked(self, number: int, sample: Any) -> tuple[Int64Array, Int64Array]:
        begin = f"{named(self.data.path)}, whose sample {number:,}"
        try:
            unknown = _unknown_keys(sample)
            tokens, labels = _pair(sample)
        except Exception as error:
            raise UserError(self.problem.format(begin, describe_error(error))) from error
        if unknown:
            raise UserError(f"{begin} has {unknown}, which the first sample lacks; give all samples the same keys.")
        if not 0 < len(tokens) <= self.sequence_length:
            raise UserError(
                f"{begin} has {len(tokens)} tokens but must have 1 to data.sequence_length {self.sequence_length}; cut "
                f"it or set data.sequence_length to {len(tokens)}."
            )
        vocab_size = self.data.vocab_size
        for kind, ids in (("token", tokens), ("label", labels[labels != IGNORE_INDEX])):
            if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
                wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
                rule = f"model.vocab_size is {vocab_size}, so ids are 0 to {vocab_size - 1}"
                raise UserError(f"{begin} has the {kind} {wrong} but {rule}; set it to {max(wrong, 0) + 1} or more.")
        return tokens, labels


def _pair(sample: Any) -> tuple[Int64Array, Int64Array]:
    if isinstance(sample, Mapping):
        sample = sample["tokens"], sample["labels"]
    if isinstance(sample, tuple) or (isinstance(sample, list) and len(sample) == 2 and np.ndim(sample[0]) == 1):
        tokens, labels = (_ids(part) for part in sample)
    else:
        both = _ids(sample)
        tokens, labels = both[:-1], both[1:]
    if len(tokens) != len(labels):
        raise ValueError(f"it has {len(tokens)} tokens and {len(labels)} labels")
    return tokens, labels


def _ids(values: Any) -> Int64Array:
    ids = np.asarray(values)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"a part of it has the shape {list(ids.shape)} and the dtype {ids.dtype}, not [S] and integers"
        )
    return ids.astype(np.int64)


@cache
def _parts(path: str) -> Mapping[str, Any]:
    """Load the datasets at an import path, once per process; what they draw meanwhile is the same in each."""
    from threefold.random.rng import fixed_generators

    with fixed_generators("data set"):
        return _made_parts(path)


def _made_parts(path: str) -> Mapping[str, Any]:
    found = load_path(path, "data.path")
    if callable(found) and (isinstance(found, type) or not _is_data_set(found)):
        try:
            found = found()
        except Exception as error:
            raise UserError(
                f"{named(path)}, which cannot be called without arguments ({describe_error(error)}); name a function "
                "that makes the data set."
            ) from error
    parts = found if isinstance(found, Mapping) else {"": found}
    for name, part in parts.items():
        if not _is_data_set(part):
            raise UserError(
                f"{named(path)}, which gives a {type(part).__name__} but must be a map-style data set, with "
                "__len__ and __getitem__, or a function that makes one."
            )
        if name and name not in SPLITS:
            raise UserError(f"{named(path)}, which has a part {name!r}; name them {', '.join(SPLITS)}.")
    return parts


def _is_data_set(thing: Any) -> bool:
    return hasattr(thing, "__getitem__") and hasattr(thing, "__len__")


@dataclass(frozen=True, eq=False)
class NestedSamples(_ReadSamples):
    """Samples of another form, batched by `batch`, as by `torch.utils.data.DataLoader`."""

    problem = "{} cannot be read ({}); correct its __getitem__."

    def batch(self, indices: Int64Array, keys: Int64Array | None = None) -> Any:
        """Collate samples into one nesting, in which every entry is a tensor with a batch dim (dim 0).

        `keys` are as in `Samples.labelled`.
        """
        from torch.utils.data import default_collate  # imports torch, which errors about a config should not wait for

        numbers = [int(number) for number in self.chosen[indices]]
        samples = self._read(numbers, keys)
        try:
            for number, sample in zip(numbers[1:], samples[1:], strict=True):
                _check_keys(sample, samples[0], number, numbers[0])
            batch = default_collate(samples)
        except Exception as error:
            raise UserError(
                f"{named(self.data.path)}, whose samples {', '.join(map(str, numbers[:3]))}, … cannot be "
                f"put into one batch ({describe_error(error)}); give all the same nesting, keys and shapes, padded say."
            ) from error
        if kind := _no_tensor(batch):
            raise UserError(
                f"{named(self.data.path)}, whose sample {numbers[0]:,} has a {kind} in it but must be "
                "tensors, arrays and numbers, or tuples, lists and mappings of these; make it a tensor."
            )
        return batch


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


def _no_tensor(batch: Any) -> str | None:
    """Return the type of an entry of a batch that is not a tensor; None if all are tensors."""
    import torch

    if isinstance(batch, torch.Tensor):
        return None
    if isinstance(batch, str | bytes) or not isinstance(batch, Mapping | tuple | list):
        return type(batch).__name__
    inside = batch.values() if isinstance(batch, Mapping) else batch
    return next((kind for each in inside if (kind := _no_tensor(each))), None)

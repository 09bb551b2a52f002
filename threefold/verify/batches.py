"""Batches for verification, the same in every layout: samples of the config's data, or random tokens without data."""

import math
from abc import ABC, abstractmethod
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from threefold.config import Config
from threefold.config.by_step import value_at
from threefold.constants import IGNORE_INDEX
from threefold.data.dataset import open_dataset
from threefold.data.loader import Batch, BatchSlice, Loader
from threefold.random.rng import stream_key

_DOCUMENT_BEGINS = 0.2
"""Probability that a random token begins a document."""


class BatchSource(ABC):
    """Source of batches as a function of config and step.

    Attributes:
        masked: whether to ignore some labels (`IGNORE_INDEX`) that the data does not ignore. False for a custom loss,
            which need not know ignored labels, or may be a mean that counts them.
        is_nested: whether batches are nested tensors for a custom model instead of tokens.
    """

    masked: bool
    is_nested: bool = False

    @abstractmethod
    def read(self, config: Config, step: int, part: BatchSlice) -> Any:
        """Return the rows of `part` of the global batch of `step`."""

    def batch(self, config: Config, step: int, dp_index: int = 0, dp: int = 1) -> Any:
        """Read a replica's rows; if `masked`, ignore some labels, a different fraction in each row.

        The ranks thus have different numbers of labels, so a mean of means is not the mean. Some rows keep all labels;
        with four or more rows, one in the middle keeps none. The first and the last row, each of which may be a
        micro-batch, always have a gradient that could be lost.
        """
        size = value_at(config.train.global_batch_size, step)
        batch = self.read(config, step, BatchSlice(size, dp_index, dp))
        if config.preference.beta:
            batch = _with_references(batch, config, step, size)
        if not self.masked:
            return batch
        generator = torch.Generator().manual_seed(stream_key("label masks", config.train.seed, step))
        chance = torch.rand((size, batch.labels.shape[1]), generator=generator)[batch.rows]
        fractions = torch.linspace(-0.1, 1.05 if size > 3 else 0.7, size).roll(size // 2)
        masked = chance < fractions[batch.rows].unsqueeze(1)
        return replace(batch, labels=batch.labels.masked_fill(masked, IGNORE_INDEX))


def _with_references(batch: Batch, config: Config, step: int, size: int) -> Batch:
    """Return a batch of pairs with random reference log-probabilities."""
    generator = torch.Generator().manual_seed(stream_key("references", config.train.seed, step))
    length, vocabulary = batch.tokens.shape[1], config.model.vocab_size
    references = -torch.rand((size, 2), generator=generator, dtype=torch.float64) * length * math.log(vocabulary)
    assert batch.documents is not None
    return replace(batch, documents=batch.documents.clamp(max=2), references=references[batch.rows])


@dataclass(frozen=True)
class RandomBatches(BatchSource):
    """Uniformly random tokens, keyed by seed and step."""

    masked: bool = True

    def read(self, config: Config, step: int, part: BatchSlice) -> Batch:
        generator = torch.Generator().manual_seed(stream_key("tokens", config.train.seed, step))
        shape = (part.global_batch_size, value_at(config.data.sequence_length, step) + 1)
        tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
        rows = torch.from_numpy(part.rows)
        documents = None
        if config.data.separate_documents or config.preference.beta:
            begins = torch.rand(shape, generator=generator) < _DOCUMENT_BEGINS
            documents = begins.cumsum(1)[rows, :-1].contiguous()
        padding = torch.randint(3, (part.global_batch_size,), generator=generator)  # is only counted
        inputs, labels = tokens[rows, :-1].contiguous(), tokens[rows, 1:].contiguous()
        return Batch(inputs, labels, rows, documents, padding=padding[rows])

    def __str__(self) -> str:
        return "random tokens"


@dataclass(frozen=True)
class DataBatches(BatchSource):
    """Training samples of the data of config `given`, read by the training loader.

    Token ids are taken modulo the vocabulary size, for a model shrunk from `given` to a smaller vocabulary.
    """

    given: Config
    masked: bool = True
    is_nested: bool = False

    def read(self, config: Config, step: int, part: BatchSlice) -> Any:
        samples = open_dataset(self.given).samples("train", config.data)
        separate = config.data.separate_documents and not self.is_nested
        with closing(Loader(samples, None, part, config.train.seed, separate)) as loader:
            batch = loader.batch(step)
        if self.is_nested:
            return batch

        def fold(tokens: Tensor) -> Tensor:
            return torch.where(tokens == IGNORE_INDEX, tokens, tokens % config.model.vocab_size)

        return replace(batch, tokens=fold(batch.tokens), labels=fold(batch.labels))

    def __str__(self) -> str:
        return f"the {'samples' if self.is_nested else 'rows'} of {', '.join(self.given.data.corpora)}"

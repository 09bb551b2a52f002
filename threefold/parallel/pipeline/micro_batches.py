"""Samples of a step on a rank, and how a stage computes with a micro-batch of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from threefold.models.layers.decoder import NOTHING, SampleInfo
from threefold.models.loss_terms import TermSums
from threefold.models.own_batch import LayerInputs, batch_shapes, batch_size, split_batch
from threefold.parallel.pipeline.stage import Stage


class StepSamples(ABC):
    """Samples of one step on a rank, or a micro-batch of them."""

    @abstractmethod
    def split(self, parts: int) -> "Sequence[StepSamples]":
        """Split into micro-batches of equal size.

        Raises:
            ValueError, UserError: the samples do not divide by `parts`.
        """

    @abstractmethod
    def through(self, stage: Stage, received: tuple[Tensor, ...] | None = None) -> Any:
        """Run a stage on received activations (None on the first); return its own, or the loss on the last stage."""

    @property
    @abstractmethod
    def shapes(self) -> Hashable:
        """Key of the samples' shapes, which decide those of the activations."""


@dataclass(frozen=True)
class LocalBatch(StepSamples):
    """Tokens and labels int64 [B, S] of a rank's replica, at the rank's positions of each sequence."""

    tokens: Tensor
    labels: Tensor
    samples: SampleInfo = NOTHING

    def split(self, parts: int) -> list["LocalBatch"]:
        if len(self.tokens) % parts:
            raise ValueError(f"{len(self.tokens)} samples do not divide into {parts} micro-batches")
        facts = [[None] * parts if fact is None else fact.chunk(parts) for fact in self.samples]
        samples = [SampleInfo(*each) for each in zip(*facts, strict=True)]
        micro_batches = zip(self.tokens.chunk(parts), self.labels.chunk(parts), samples, strict=True)
        return [LocalBatch(*each) for each in micro_batches]

    def through(self, stage: Stage, received: tuple[Tensor, ...] | None = None) -> Any:
        return stage(self.tokens if received is None else received[0], self.labels, self.samples)

    @property
    def shapes(self) -> Hashable:
        return tuple(self.tokens.shape)


@dataclass(frozen=True)
class OwnBatch(StepSamples):
    """Batch of a user's own model (tensors in any nesting), whose loss is a function of the last layer's output."""

    data: Any
    loss: TermSums
    dtype: torch.dtype
    samples: SampleInfo = NOTHING

    def split(self, parts: int) -> list["OwnBatch"]:
        data, keys = split_batch(self.data, parts), self.samples.keys
        samples = [NOTHING] * parts if keys is None else [SampleInfo(each) for each in keys.chunk(parts)]
        return [OwnBatch(part, self.loss, self.dtype, of_part) for part, of_part in zip(data, samples, strict=True)]

    def through(self, stage: Stage, received: tuple[Tensor, ...] | None = None) -> Any:
        first = stage.layer_signatures[stage.layer_names[0]]
        inputs = first.inputs_of(self.data, self.dtype) if received is None else LayerInputs(received, {})
        output = stage(inputs, None, self.samples)
        return self.loss(output, self.data, batch_size(self.data)) if stage.gives_loss else output

    @property
    def shapes(self) -> Hashable:
        return batch_shapes(self.data)


Entry = tuple[Tensor, Callable[[], Tensor]]
"""Leaf, and the function that computes one of its gradients."""
Watch = Callable[[Tensor], Callable[[Tensor], None]]
"""Function called with a leaf when its gradient is deferred; returns a function to call with the computed gradient."""


class DeferredGradients:
    """Store of deferred weight gradients; `is_open` while backward passes defer to it, within `collecting`."""

    def __init__(self) -> None:
        self.is_open = False
        self._entries: list[Entry] = []
        self._outstanding = 0
        self._add: Callable[[Tensor, Tensor], None] | None = None
        self._watch: Watch | None = None

    def defer(self, leaf: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Add `gradient()` to the gradient of `leaf` later."""
        if self._watch is not None:
            gradient = partial(_watched, gradient, self._watch(leaf))
        self._entries.append((leaf, gradient))

    @contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        """Call `watch` for the gradients that are deferred within the block."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    def take(self) -> Callable[[], None]:
        """Return a function that computes the gradients deferred since the last call: one micro-batch on one stage."""
        entries, self._entries = self._entries, []
        self._outstanding += 1
        return partial(self._compute, entries)

    @contextmanager
    def collecting(self, add: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
        """Defer the weight gradients of one step's backward passes; `add` accumulates each in its leaf's gradient.

        Raises:
            RuntimeError: some gradients were never computed.
        """
        self.is_open, self._add = True, add
        try:
            yield
        finally:
            self.is_open = False
        if self._entries or self._outstanding:
            raise RuntimeError("the schedule ended before all weight gradients were computed")

    def _compute(self, entries: list[Entry]) -> None:
        self._outstanding -= 1
        self._add_all(entries)

    @torch.no_grad()
    def _add_all(self, entries: list[Entry]) -> None:
        assert self._add is not None  # set before anything was deferred
        while entries:  # each frees its activations when it is done
            leaf, gradient = entries.pop(0)
            self._add(leaf, gradient())


def _watched(gradient: Callable[[], Tensor], see: Callable[[Tensor], None]) -> Tensor:
    computed = gradient()
    see(computed)
    return computed

"""Deferred weight gradients, with which zero-bubble schedules fill the pipeline bubble.

The previous stage waits for the gradient of a stage's input; the gradients of its weights are needed only by the
optimizer step (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241). So the backward pass of the linear
layers of `threefold.ops.kernels` defers the latter to the store that their weights were made with, while that is open;
the schedule computes those of a micro-batch when the rank would be idle. Layers that do not use the store compute all
their gradients in the backward pass, which is right too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

Entry = tuple[Tensor, Callable[[], Tensor]]
"""A leaf, and the function that computes one of its gradients."""
Watch = Callable[[Tensor], Callable[[Tensor], None]]
"""Called with a leaf when a gradient of it is deferred; returns what is called with the gradient, once computed."""


class DeferredGradients:
    """A rank's store of deferred weight gradients.

    Attributes:
        is_open: whether backward passes defer weight gradients to this store, as they do within `collecting`.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._entries: list[Entry] = []
        self._outstanding = 0
        self._add: Callable[[Tensor, Tensor], None] | None = None
        self._watch: Watch | None = None

    def defer(self, leaf: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Have `gradient()` added to the gradient of `leaf` later."""
        if self._watch is not None:
            gradient = partial(_watched, gradient, self._watch(leaf))
        self._entries.append((leaf, gradient))

    @contextmanager
    def watching(self, watch: Watch) -> Iterator[None]:
        """Have `watch` see the gradients that are deferred within the block."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    def take(self) -> Callable[[], None]:
        """What computes all that was deferred since the last call: one micro-batch's weight gradients on one stage."""
        entries, self._entries = self._entries, []
        self._outstanding += 1
        return partial(self._compute, entries)

    @contextmanager
    def collecting(self, add: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
        """Defer the weight gradients of the block's backward passes, those of one step.

        Args:
            add: adds a gradient to that of its leaf, in the dtype that gradients are accumulated in.

        Raises:
            RuntimeError: at its end, some were never computed.
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

"""Weight gradients put off: what zero-bubble schedules fill their idle time with.

A backward pass owes the gradient of its input to the stage before, at once, and those of its weights to nobody before
the update (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241). So the linear layers of
`threefold.ops.kernels` only note down what their weights' gradients are made of, where a store is attached to the
weight; the schedule has the notes of a micro-batch worked off when the rank would wait. Layers that know nothing of
this compute all their gradients in the backward pass, which is right too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from threefold.ops.kernels import DEFERRED

Note = tuple[Tensor, Callable[[], Tensor]]


class DeferredGradients:
    """A rank's store of weight gradients that are still to be computed.

    Args:
        leaves: the tensors that the rank's stages compute with.
        add: adds a gradient to that of its leaf, in the dtype that gradients are added up in.
    """

    def __init__(self, leaves: Sequence[Tensor], add: Callable[[Tensor, Tensor], None]) -> None:
        self._leaves, self._add = leaves, add
        self._notes: list[Note] = []
        self._owed = 0

    def defer(self, leaf: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Note down how to compute a gradient of `leaf` later."""
        self._notes.append((leaf, gradient))

    def take(self) -> Callable[[], None]:
        """What works off all that was noted down since the last call: one micro-batch's weights on one stage."""
        notes, self._notes = self._notes, []
        self._owed += 1
        return partial(self._work_off, notes)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Have the leaves' linear layers put their gradients off during the block, a whole step's passes.

        Raises:
            RuntimeError: at its end, some were never computed.
        """
        for leaf in self._leaves:
            setattr(leaf, DEFERRED, self)
        try:
            yield
        finally:
            for leaf in self._leaves:
                delattr(leaf, DEFERRED)
        if self._notes or self._owed:
            raise RuntimeError("the schedule ended before all weight gradients were computed")

    def _work_off(self, notes: list[Note]) -> None:
        self._owed -= 1
        self._add_all(notes)

    @torch.no_grad()
    def _add_all(self, notes: list[Note]) -> None:
        while notes:  # each lets go of its activations when it is done
            leaf, gradient = notes.pop(0)
            self._add(leaf, gradient())

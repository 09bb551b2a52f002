"""The tensors that an optimizer updates: the masters, or whole weights for an optimizer that needs them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from threefold.train.optimizers.base import Entry


class UpdatedWeights:
    """What a `torch.optim.Optimizer` updates for each entry: its master, or the whole weight where the optimizer needs
    that and the layout cuts it.

    Every rank that holds a shard of a gathered weight makes the same update of the whole, and keeps its shard of the
    result. That costs an all-gather of the gradient in each step, and on each of these ranks the memory of the whole
    weight and of its whole state.

    Collective over the axes that cut the weights, as its methods: all ranks call them in the same order.

    Args:
        entries: this rank's weights.
        gathers: whether the optimizer needs whole weights.
    """

    def __init__(self, entries: Sequence[Entry], gathers: bool) -> None:
        self._entries = list(entries)
        self._tensors: dict[str, Tensor] = {}
        for entry in self._entries:
            if not gathers or entry.whole.is_whole:
                self._tensors[entry.name] = entry.master
            else:
                self._tensors[entry.name] = entry.whole.gather(entry.master.detach()).clone().requires_grad_()

    def of(self, entry: Entry) -> Tensor:
        """What the optimizer updates for an entry."""
        return self._tensors[entry.name]

    def is_gathered(self, entry: Entry) -> bool:
        """Whether that is a whole weight that the layout cuts."""
        return self.of(entry) is not entry.master

    def set_gradients(self) -> None:
        """Give each tensor its gradient."""
        for entry in self._entries:
            gradient = entry.gradient
            self.of(entry).grad = entry.whole.gather(gradient) if self.is_gathered(entry) else gradient

    @torch.no_grad()
    def keep_shards(self) -> None:
        """Set the masters from the whole weights, after the optimizer has updated these."""
        for entry in self._entries:
            if self.is_gathered(entry):
                self.of(entry).grad = None
                entry.master.copy_(entry.whole.shard(self.of(entry), entry.master))

    @torch.no_grad()
    def gather_again(self) -> None:
        """Set the whole weights from the masters, after something else has changed these."""
        for entry in self._entries:
            if self.is_gathered(entry):
                self.of(entry).detach().copy_(entry.whole.gather(entry.master.detach()))

    def is_replicated(self, entry: Entry, shape: torch.Size) -> bool:
        """Whether a state that the optimizer keeps in this shape is the same on all ranks that have the weight, rather
        than sharded as it is."""
        return shape != self.of(entry).shape

    def shard_of_state(self, entry: Entry, value: Tensor) -> Tensor:
        """This rank's part of a state that the optimizer keeps; all of it where it is replicated."""
        if not self.is_gathered(entry) or self.is_replicated(entry, value.shape):
            return value
        return entry.whole.shard(value, entry.master).contiguous()

    def whole_state(self, entry: Entry, part: Tensor, shape: torch.Size) -> Tensor:
        """A state as the optimizer keeps it, in this shape, from each rank's part."""
        if not self.is_gathered(entry) or self.is_replicated(entry, shape):
            return part
        return entry.whole.gather(part).clone()

"""The exponential moving average of the trained weights (`optimizer.ema_decay`), sharded like the optimizer's state."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from threefold.config import OptimizerConfig
from threefold.parallel.parameter import Weight


class WeightAverage:
    """Exponential moving average of the master weights on this rank, in fp32 or the masters' dtype if that is wider.

    Each element is averaged by itself, with the same roundings wherever it lies in a shard, so the average has the same
    bits in every layout in which the weights have. Until `ema_start` it equals the weights. Frozen weights, which are
    their own average, have none.

    Attributes:
        tensors: averages by the name of the weight, of the shape of its master.
    """

    def __init__(self, entries: Sequence[Weight], config: OptimizerConfig) -> None:
        self._entries, self._config = entries, config
        self.tensors = {entry.name: _wide(entry.master.detach().clone()) for entry in entries}

    def decay(self, update: int) -> float | None:
        """Return the weight of the average so far in an update, 1 for the first; None if the update does not count."""
        config = self._config
        assert config.ema_decay is not None
        if update <= config.ema_start:
            return 0.0
        count, rest = divmod(update - config.ema_start, config.ema_every)
        if rest:
            return None
        return min(config.ema_decay, (1 + count) / (10 + count)) if config.ema_warmup else config.ema_decay

    @torch.no_grad()
    def update(self, update: int) -> None:
        """Average the weights that an update has made; it counts from 1, skipped ones included."""
        decay = self.decay(update)
        if decay == 0:
            self.reset()
        elif decay is not None:
            for average, entry in self._pairs():
                average.add_((_wide(entry.master) - average).mul_(1 - decay))

    @torch.no_grad()
    def reset(self, kept: Collection[str] = ()) -> None:
        """Start again from the weights, but for those that are `kept`."""
        for average, entry in self._pairs():
            if entry.name not in kept:
                average.copy_(entry.master)

    @contextmanager
    def in_masters(self) -> Iterator[None]:
        """Put the averages in place of the masters within the block, a tensor at a time."""
        kept: dict[str, Tensor] = {}
        with torch.no_grad():
            for average, entry in self._pairs():
                master = entry.master.clone()
                entry.master.copy_(average)
                if average.dtype == master.dtype:
                    average.copy_(master)
                else:
                    kept[entry.name] = master
        try:
            yield
        finally:
            with torch.no_grad():
                for average, entry in self._pairs():
                    value = entry.master.clone()
                    entry.master.copy_(kept.get(entry.name, average))
                    if entry.name not in kept:
                        average.copy_(value)

    def _pairs(self) -> Iterator[tuple[Tensor, Weight]]:
        return ((self.tensors[entry.name], entry) for entry in self._entries)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()

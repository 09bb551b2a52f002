"""Stochastic gradient descent, optionally with momentum (Sutskever et al., ICML 2013)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from threefold.config import OptimizerConfig
from threefold.train.optim import Entry, TorchRule, zeros


class SGD(TorchRule):
    """`torch.optim.SGD`: reads `momentum` and `nesterov`; keeps `momentum_buffer` unless the momentum is 0."""

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig) -> None:
        super().__init__(entries, config)
        if self._torch is not None and config.momentum:
            for entry in self.entries:  # now and not in the first step, so that a checkpoint always finds the state
                self._torch.state[entry.master] = {"momentum_buffer": zeros(entry.master)}

    def make(self, groups: Sequence[tuple[list[Tensor], float]]) -> torch.optim.Optimizer:
        config = self.config
        given = [{"params": params, "weight_decay": decay} for params, decay in groups]
        return torch.optim.SGD(given, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True)

    def state(self, entry: Entry) -> Mapping[str, Tensor]:
        return self._torch.state.get(entry.master, {}) if self._torch is not None else {}

"""Stochastic gradient descent, optionally with momentum (Sutskever et al., ICML 2013)."""

from typing import Any

import torch
from torch import Tensor

from threefold.config import OptimizerConfig
from threefold.config.optimizer import BUILT_IN
from threefold.train.optimizers.base import TorchRule, zeros


class SGD(TorchRule):
    """`torch.optim.SGD`: reads `momentum` and `nesterov`; keeps `momentum_buffer` unless the momentum is 0."""

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        config = self.config
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=True)

    def initial_state(self, master: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": zeros(master)} if self.config.momentum else {}

    @classmethod
    def states_per_element(cls, config: OptimizerConfig, is_hidden_matrix: bool) -> int:
        return BUILT_IN["sgd"].states(config, is_hidden_matrix)

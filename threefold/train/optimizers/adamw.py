"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""

from typing import Any

import torch
from torch import Tensor

from threefold.config import OptimizerConfig
from threefold.config.optimizer import BUILT_IN
from threefold.train.optimizers.base import TorchRule, zeros


class AdamW(TorchRule):
    """`torch.optim.AdamW`; reads `betas` and `eps`; keeps `step` (a scalar), `exp_avg` and `exp_avg_sq`."""

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        config = self.config
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    def initial_state(self, master: Tensor) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
            "exp_avg": zeros(master),
            "exp_avg_sq": zeros(master),
        }

    @classmethod
    def states_per_element(cls, config: OptimizerConfig, is_hidden_matrix: bool) -> int:
        return BUILT_IN["adamw"].states(config, is_hidden_matrix)

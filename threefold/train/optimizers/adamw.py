"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from threefold.config import OptimizerConfig
from threefold.config.optimizer import BUILT_IN
from threefold.torch_private.tensors import fused_adam_
from threefold.train.optimizers.base import Entry, TorchRule, zeros


class _Group:
    def __init__(self, decay: float, entries: Sequence[Entry], states: Sequence[dict[str, Tensor]]) -> None:
        self.decay, self.entries = decay, entries
        self.masters = [entry.master for entry in entries]
        self.means = [state["exp_avg"] for state in states]
        self.squares = [state["exp_avg_sq"] for state in states]
        self.counts = torch.stack([state["step"] for state in states])
        self.steps = self.counts.unbind()
        for state, step in zip(states, self.steps, strict=True):
            state["step"] = step  # views of one tensor, so that one operation counts them all


class AdamW(TorchRule):
    """`torch.optim.AdamW`: reads `betas` and `eps`; keeps `step` (a scalar), `exp_avg` and `exp_avg_sq`."""

    decoupled: ClassVar[bool] = True
    """Whether weight decay shrinks the weight instead of being added to the gradient."""

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig) -> None:
        super().__init__(entries, config)
        by_decay: dict[float, list[Entry]] = {}
        for entry in self.entries:
            by_decay.setdefault(self.weight_decay(entry), []).append(entry)
        self._groups = [
            _Group(decay, group, [self._of_torch.state[entry.master] for entry in group])
            for decay, group in by_decay.items()
        ]

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        config = self.config
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    def initial_state(self, master: Tensor) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
            "exp_avg": zeros(master),
            "exp_avg_sq": zeros(master),
        }

    def step(self, lr: float) -> None:
        """Update with torch's kernel directly, as the overhead of torch's optimizer shows in a small model's step."""
        for group in self._groups:
            group.counts.add_(1)
            fused_adam_(
                group.masters,
                [entry.gradient for entry in group.entries],
                group.means,
                group.squares,
                group.steps,
                self.decoupled,
                lr=lr,
                betas=self.config.betas,
                weight_decay=group.decay,
                eps=self.config.eps,
            )

    @classmethod
    def states_per_element(cls, config: OptimizerConfig, is_hidden_matrix: bool) -> int:
        return BUILT_IN["adamw"].states(config, is_hidden_matrix)


class Adam(AdamW):
    """`torch.optim.Adam`: reads and keeps the same as `AdamW`."""

    decoupled: ClassVar[bool] = False

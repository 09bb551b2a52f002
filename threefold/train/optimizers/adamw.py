"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from threefold.config import OptimizerConfig
from threefold.torch_private.tensors import fused_adam_
from threefold.train.optim import Entry, UpdateRule, zeros


class AdamW(UpdateRule):
    """AdamW as torch computes it: reads `betas` and `eps`; keeps `step` (a scalar), `exp_avg` and `exp_avg_sq`.

    It calls the kernel of `torch.optim.AdamW` directly, as the overhead of torch's optimizer shows in a small model's
    step.
    """

    decoupled: ClassVar[bool] = True
    """Whether weight decay shrinks the weight instead of being added to the gradient."""

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig) -> None:
        super().__init__(entries, config)
        by_decay: dict[float, list[Entry]] = {}
        for entry in self.entries:
            by_decay.setdefault(self.weight_decay(entry), []).append(entry)
        self._groups = [_Group(decay, group) for decay, group in by_decay.items()]
        self._states = {
            entry.name: {"step": step, "exp_avg": mean, "exp_avg_sq": square}
            for group in self._groups
            for entry, step, mean, square in zip(group.entries, group.steps, group.means, group.squares, strict=True)
        }

    def step(self, lr: float) -> None:
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

    def state(self, entry: Entry) -> Mapping[str, Tensor]:
        return self._states[entry.name]


class _Group:
    """Entries with one weight decay and their states; the counts of updates are views of one tensor."""

    def __init__(self, decay: float, entries: Sequence[Entry]) -> None:
        self.decay, self.entries = decay, entries
        self.masters = [entry.master for entry in entries]
        self.means, self.squares = (
            [zeros(master) for master in self.masters],
            [zeros(master) for master in self.masters],
        )
        self.counts = torch.zeros(len(entries), dtype=torch.float32, device=self.masters[0].device)
        self.steps = self.counts.unbind()


class Adam(AdamW):
    """Adam, with weight decay added to the gradient: reads and keeps the same as `AdamW`."""

    decoupled: ClassVar[bool] = False

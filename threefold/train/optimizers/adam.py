"""Adam (Kingma and Ba, arXiv 1412.6980), its weight decay added to the gradient (L2 penalty)."""

from typing import Any

import torch

from threefold.train.optimizers.adamw import AdamW


class Adam(AdamW):
    """`torch.optim.Adam`; reads and keeps what `AdamW` does."""

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        config = self.config
        return torch.optim.Adam(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

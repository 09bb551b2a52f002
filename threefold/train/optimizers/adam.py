"""Adam (Kingma and Ba, arXiv 1412.6980), its weight decay added to the gradient (L2 penalty)."""

from typing import ClassVar

from threefold.train.optimizers.adamw import AdamW


class Adam(AdamW):
    """`torch.optim.Adam`; reads and keeps what `AdamW` does."""

    decoupled: ClassVar[bool] = False

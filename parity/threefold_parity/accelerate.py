"""Adapter for Hugging Face Accelerate: a prepared model and optimizer, with any of its backends.

    recorder = parity.Recorder(model, optimizer, AccelerateAdapter())     # after accelerator.prepare

DistributedDataParallel and FSDP2 are PyTorch's own; Accelerate only decides when an optimizer steps and what clips the
gradients. With its DeepSpeed backend, give the model to `DeepSpeedAdapter` instead.
"""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from threefold_parity.adapters import ClippingAdapter, Place
from threefold_parity.text import UserError


class AccelerateAdapter(ClippingAdapter):
    """Adapter for Accelerate.

    Gradients are recorded when `accelerator.clip_grad_norm_` is called, or else when the optimizer steps: after the
    last micro-batch of `accelerator.accumulate`, unscaled.

    Args:
        place: as for `Adapter`.
        copies: whether every rank holds the whole model, as with DistributedDataParallel. Detected for a prepared
            model, but not for one that is no longer wrapped, such as callbacks of `transformers` receive.
    """

    name = "accelerate"

    def __init__(self, place: Place | None = None, copies: bool = False) -> None:
        super().__init__(place)
        self._copies = copies

    def bind(self, models: list[nn.Module], optimizer: Any) -> None:
        while hasattr(optimizer, "accelerator_state"):  # wrapped once by each call of prepare
            optimizer = optimizer.optimizer
        if optimizer is not None and not hasattr(optimizer, "register_step_pre_hook"):
            raise UserError(
                f"AccelerateAdapter got an optimizer of type {type(optimizer).__name__}, which has no hooks, as with "
                "another backend; with DeepSpeed, use DeepSpeedAdapter and give it the prepared model."
            )
        super().bind(models, optimizer)
        sharded = any(isinstance(each, DTensor) for model in models for each in model.parameters())
        if self._copies and not sharded and dist.is_initialized():
            self._copy = dist.get_rank()

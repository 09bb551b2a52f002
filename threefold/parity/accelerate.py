"""Adapter of Hugging Face Accelerate: a prepared model and optimizer, with any of its backends.

    recorder = parity.Recorder(model, optimizer, AccelerateAdapter())     # after accelerator.prepare

DistributedDataParallel and FSDP2 are PyTorch's own; what is Accelerate's is when an optimizer steps and what clips.
With its DeepSpeed backend, give the model to `DeepSpeedAdapter` instead.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from threefold.errors import UserError
from threefold.parity.adapters import Adapter, Place
from threefold.parity.clipping import ClippingHook


class AccelerateAdapter(Adapter):
    """Adapter of Accelerate.

    Gradients are recorded when `accelerator.clip_grad_norm_` is called, or else when the optimizer steps: after the
    last micro-batch of `accelerator.accumulate`, unscaled.

    Args:
        place: as for `Adapter`.
        copies: whether every rank holds the whole model, as with DistributedDataParallel. Known of a prepared model;
            a model that is no longer wrapped, as callbacks of `transformers` get it, does not show it.
    """

    name = "accelerate"

    def __init__(self, place: Place | None = None, copies: bool = False) -> None:
        super().__init__(place)
        self._copies = copies
        self._clipping: ClippingHook | None = None

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

    def watch(self, before: Callable[[], None], after: Callable[[], None]) -> list[Any]:
        handles = super().watch(before, after)
        if handles:
            self._clipping = ClippingHook((each for _, each in self.parameters()), before)
            handles.append(self._clipping)
        return handles

    def numbers(self) -> Mapping[str, float]:
        norm = self._clipping.norm if self._clipping else None
        return {} if norm is None else {"gradient norm": norm}

"""Adapter for torchtitan: the model parts and the container of optimizers of its Trainer.

    recorder = parity.Recorder(trainer.model_parts, trainer.optimizers, TorchtitanAdapter())  # before trainer.train()

Its parameters are DTensors, or plain ones of a pipeline stage under global names, which the base class handles.
Specific to torchtitan are one optimizer for each model part and its own clipping function.
"""

from collections.abc import Sequence
from typing import Any

from threefold_parity.adapters import ClippingAdapter


class TorchtitanAdapter(ClippingAdapter):
    """Adapter for torchtitan.

    Gradients are recorded when torchtitan clips them, after all micro-batches.
    """

    name = "torchtitan"

    def _optimizers(self) -> Sequence[Any]:
        return list(self.optimizer.optimizers)

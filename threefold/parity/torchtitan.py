"""Adapter for torchtitan: the model parts and the container of optimizers of its Trainer.

    recorder = parity.Recorder(trainer.model_parts, trainer.optimizers, TorchtitanAdapter())  # before trainer.train()

Its parameters are DTensors, or plain ones of a pipeline stage under global names, which the base class handles.
Specific to torchtitan are one optimizer for each model part and its own clipping function.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from threefold.parity.adapters import ClippingAdapter


class TorchtitanAdapter(ClippingAdapter):
    """Adapter for torchtitan.

    Gradients are recorded when torchtitan clips them, after all micro-batches.
    """

    name = "torchtitan"

    def counters(self, name: str, parameter: nn.Parameter) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for optimizer in self.optimizer.optimizers:
            for group in optimizer.param_groups:
                if any(each is parameter for each in group["params"]):
                    found |= {key: float(group[key]) for key in ("lr", "weight_decay") if key in group}
        step = self._state(parameter).get("step")
        return found if step is None else {**found, "updates": float(step)}

    def _state(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        for optimizer in self.optimizer.optimizers:
            with suppress(KeyError):
                if found := optimizer.state.get(parameter):
                    return dict(found)
        return {}

"""What Python and autograd take for a block: training steps of the least sizes, whose kernels take next to no time."""

from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

import torch

from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config, resolve
from threefold.data.loader import Batch
from threefold.models.registry import make_model, model_plan
from threefold.train.engine import Engine

_LAYERS, _HIDDEN, _HEADS, _VOCAB, _LENGTH = 4, 32, 8, 32, 16
_FEW, _MANY = 1, 4
"""Micro-batches of the two steps whose difference counts, so that what a step does once does not."""


@cache
def tiny_config(
    micro_batches: int = _FEW, dp: int = 1, tp: int = 1, cp: int = 1, zero: int = 0, device: str = "cpu"
) -> Config:
    """A GPT of the least sizes, resolved, with so many micro-batches on each data-parallel rank of a layout."""
    given: dict[str, Any] = {
        "model": {
            "num_layers": _LAYERS,
            "hidden_size": _HIDDEN,
            "num_attention_heads": _HEADS,
            "vocab_size": _VOCAB,
        },
        "data": {"path": "none", "sequence_length": _LENGTH},
        "parallel": {"dp": dp, "tp": tp, "cp": cp, "zero": zero},
        "train": {"global_batch_size": dp * micro_batches, "micro_batch_size": 1, "device": device},
    }
    return resolve(Config.model_validate(given), _VOCAB)


def measure_block(
    seconds_of: Callable[[Callable[[], object]], float],
    ranks: int,
    device: torch.device,
    *,
    tp: int = 1,
    cp: int = 1,
    zero: int = 0,
) -> float:
    """Seconds of one tiny block's forward and backward pass of a micro-batch. Collective over the world.

    Args:
        seconds_of: times an operation on all ranks at once.
        ranks: of the world.
        device: of this rank.
        tp, cp, zero: as in `parallel`; tp and cp divide `ranks`.
    """
    dp = ranks // (tp * cp)
    mesh = Mesh(Layout(dp=dp, tp=tp, cp=cp), device)
    configs = (tiny_config(micro_batches, dp, tp, cp, zero, device.type) for micro_batches in (_FEW, _MANY))
    few, many = (seconds_of(_step(config, mesh)) for config in configs)
    return max(0.0, many - few) / ((_MANY - _FEW) * _LAYERS)


def _step(config: Config, mesh: Mesh) -> Callable[[], object]:
    engine = Engine(lambda: make_model(config.model), model_plan(config.model, _LENGTH), mesh, config)
    rows = torch.arange(config.train.global_batch_size).chunk(mesh.dp.size)[mesh.dp.index]
    tokens = torch.zeros(len(rows), _LENGTH, dtype=torch.int64)  # the engine takes them to the device
    numbers = count()

    def step() -> object:
        return engine.train_step(Batch(tokens, tokens, rows), next(numbers))

    return step

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

_LAYERS, _HIDDEN, _VOCAB, _LENGTH = 4, 32, 32, 16
_FEW, _MANY = 1, 4
"""Micro-batches of the two steps whose difference counts, so that what a step does once does not."""


@cache
def tiny_config(micro_batches: int = _FEW, ranks: int = 1, device: str = "cpu", zero: int = 0) -> Config:
    """A GPT of the least sizes, resolved, with so many micro-batches on each of so many data-parallel ranks."""
    given: dict[str, Any] = {
        "model": {
            "num_layers": _LAYERS,
            "hidden_size": _HIDDEN,
            "num_attention_heads": 2,
            "vocab_size": _VOCAB,
        },
        "data": {"path": "none", "sequence_length": _LENGTH},
        "parallel": {"dp": ranks, "zero": zero},
        "train": {"global_batch_size": ranks * micro_batches, "micro_batch_size": 1, "device": device},
    }
    return resolve(Config.model_validate(given), _VOCAB)


def measure_block(
    seconds_of: Callable[[Callable[[], object]], float], ranks: int, device: torch.device, zero: int = 0
) -> float:
    """Seconds of one tiny block's forward and backward pass of a micro-batch. Collective over the world.

    Args:
        seconds_of: times an operation on all ranks at once.
        ranks: of the world.
        device: of this rank.
        zero: as `parallel.zero`.
    """
    mesh = Mesh(Layout(dp=ranks), device)
    configs = (tiny_config(micro_batches, ranks, device.type, zero) for micro_batches in (_FEW, _MANY))
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

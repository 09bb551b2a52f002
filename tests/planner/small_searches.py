"""Small models, and every layout of few ranks that the search considers."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from threefold.config import Config, resolve
from threefold.config.loading import config_of
from threefold.config.schedules import SCHEDULES
from threefold.models.family import model_plan
from threefold.planner.search import Soundness
from threefold.planner.space import Check, LayoutChoice, Space, alone, layout_rules

MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "gpt": {
        "model": {"num_layers": 6, "hidden_size": 48, "num_attention_heads": 12, "vocab_size": 50},
        "data": {"path": "x", "sequence_length": 24},
        "train": {"global_batch_size": 12},
    },
    "experts": {
        "model": {
            "architecture": "llama",
            "num_layers": 4,
            "hidden_size": 60,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 9,
            "num_experts": 12,
            "head_dim": 4,
        },
        "data": {"path": "x", "sequence_length": 32},
        "train": {"global_batch_size": 12, "compile": True},
        "precision": {"dtype": "bf16"},
    },
    "compressed": {
        "model": {"num_layers": 5, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64},
        "data": {"path": "x", "sequence_length": 16},
        "parallel": {"gradient_compression": "fp16", "partition": [2, 4]},
        "train": {"global_batch_size": 8, "gradient_accumulation_steps": 2},
    },
}


def given(name: str) -> Config:
    return config_of(MODELS[name])


def base(name: str) -> Config:
    """Return the config on one rank, resolved."""
    return resolve(alone(given(name)), 1)


def space_of(config: Config, fixed: dict[str, Any] | None = None, schedules: Sequence[str] = tuple(SCHEDULES)) -> Space:
    plan = model_plan(config.model, config.data.sequence_length)
    return Space(config, len(plan.layers), fixed or {}, schedules)


def rules_of(config: Config) -> tuple[Check, ...]:
    return layout_rules(model_plan(config.model, config.data.sequence_length))


def every_layout(space: Space, gpus: int) -> Iterator[tuple[LayoutChoice, bool]]:
    """Yield every layout of `gpus` ranks, and whether the search calls it sound."""
    soundness = Soundness(space, rules_of(space.config))
    for mesh in space.meshes(gpus):
        options = space.options(mesh)
        mask = soundness.mask(mesh, options)
        for place in np.ndindex(options.shape):
            sound = mask is not None and bool(
                mask[tuple(0 if length == 1 else at for at, length in zip(place, mask.shape, strict=True))]
            )
            yield options.choice(mesh, place), sound

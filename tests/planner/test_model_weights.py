"""What the families say of the shapes of their weights is what their constructors make."""

from typing import Any

import pytest
import torch

from threefold.config import Config
from threefold.data.dataset import resolve_without_data
from threefold.models.family import make_model
from threefold.planner.block import describe_model
from threefold.planner.model_size import ModelWeights

SMALL = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 6, "vocab_size": 40}
LLAMA = {**SMALL, "architecture": "llama", "num_key_value_heads": 3}
MIXTURE = {**LLAMA, "num_experts": 4, "expert_ffn_hidden_size": 16, "dense_layers": 1}


@pytest.mark.parametrize(
    "model",
    [
        SMALL,
        {**SMALL, "position_embedding": "rope", "tie_embeddings": False, "ffn_hidden_size": 30},
        {**LLAMA, "qkv_bias": True, "qk_norm": True, "head_dim": 6, "tie_embeddings": True},
        MIXTURE,
        {**MIXTURE, "shared_expert_ffn_hidden_size": 10, "shared_expert_gate": True},
    ],
    ids=["gpt", "gpt, rotary", "llama", "mixture", "mixture with a shared expert"],
)
def test_shapes_are_those_of_the_model(model: dict[str, Any]) -> None:
    config = resolve_without_data(Config.model_validate({"data": {"path": "unused"}, "model": model}))
    described = describe_model(config.model, config.data.sequence_length)
    with torch.device("meta"):
        made = make_model(config.model)
    for layer, weights in described.weights.items():
        named = made.get_submodule(layer).named_parameters()
        found = [(described.plan.whole_name(f"{layer}.{name}"), tuple(weight.shape)) for name, weight in named]
        assert [(weight.name, weight.shape) for weight in weights] == found


def test_layers_alike_are_counted_once() -> None:
    config = resolve_without_data(Config.model_validate({"data": {"path": "unused"}, "model": MIXTURE}))
    kinds = ModelWeights(describe_model(config.model, 256)).kinds
    assert kinds["blocks.1"] == kinds["blocks.2"]
    assert len({kinds[layer] for layer in ("embed", "blocks.0", "blocks.1", "head")}) == 4

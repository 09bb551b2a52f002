"""Model FLOPs: equal to the formulas and the published figures of Megatron-LM, and without torch."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from threefold.config import Config, ModelConfig, resolve
from threefold.models.family import make_model
from threefold.models.source import ConfigSource
from threefold.planner.block import Latents, block_shapes, describe_model, further_blocks, model_flops_per_token
from threefold.planner.model_size import flops_per_token


def filled(sequence_length: int, **settings: object) -> ModelConfig:
    config = ModelConfig.model_validate(settings)
    values = {name: value for name, value in config.filled(sequence_length).items() if getattr(config, name) is None}
    return config.model_copy(update=values)


@pytest.mark.parametrize(
    ("heads", "hidden", "layers", "gpus", "batch", "teraflops", "seconds"),
    [
        (24, 2304, 24, 32, 512, 137, 3.53),
        (32, 4096, 36, 128, 512, 142, 3.70),
        (64, 8192, 48, 512, 1536, 138, 14.45),
        (96, 12288, 80, 1536, 2304, 148, 24.82),
        (128, 20480, 105, 2520, 2520, 163, 54.08),
    ],
)
def test_the_rates_that_megatron_published(
    heads: int, hidden: int, layers: int, gpus: int, batch: int, teraflops: float, seconds: float
) -> None:
    """arXiv 2104.04473, table 1: with full recompute, so that four thirds of the blocks' model FLOPs are computed."""
    length, vocab = 2048, 51200
    config = filled(length, num_layers=layers, hidden_size=hidden, num_attention_heads=heads, vocab_size=vocab)
    flops = model_flops_per_token(config, length)
    assert flops == pytest.approx(
        72 * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (12 * layers * hidden))
    )
    head = 6 * hidden * vocab
    computed = (4 / 3 * (flops - head) + head) * batch * length
    assert computed / seconds / gpus / 1e12 == pytest.approx(teraflops, rel=0.02)


def test_grouped_queries_windows_and_experts() -> None:
    sizes = {"architecture": "llama", "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "ffn_hidden_size": 96}
    attention = 64 * 16 * (4 + 2 + 2) + 4 * 16 * 64
    dense = 6 * (2 * (attention + 3 * 64 * 96 + 2 * 4 * 16 * 32) + 64 * 100)
    assert model_flops_per_token(filled(32, **sizes), 32) == dense
    windowed = model_flops_per_token(filled(32, **sizes, sliding_window=8, full_attention_layers=1), 32)
    assert windowed == dense - 6 * 2 * 4 * 16 * (32 - 8)
    experts = {"num_experts": 8, "experts_per_token": 3, "expert_ffn_hidden_size": 40, "moe_every": 2}
    mixture = model_flops_per_token(filled(32, **sizes, **experts), 32)
    assert mixture == dense + 6 * 64 * (3 * 3 * 40 + 8 - 3 * 96)


def test_latent_attention() -> None:
    sizes = {
        "architecture": "deepseek",
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    sizes |= {"plain_head_dim": 12, "rope_head_dim": 6, "value_head_dim": 10, "key_value_rank": 20}
    projections = 64 * (20 + 6) + 20 * 4 * (12 + 10) + 4 * 10 * 64 + 3 * 64 * 96
    rest = 6 * (2 * (projections + 4 * (12 + 6 + 10) * 32) + 64 * 100)
    plain = filled(32, **sizes, ffn_hidden_size=96)
    assert model_flops_per_token(plain, 32) == rest + 6 * 2 * 64 * 4 * 18
    narrow = filled(32, **sizes, ffn_hidden_size=96, query_rank=14)
    assert model_flops_per_token(narrow, 32) == rest + 6 * 2 * 14 * (64 + 4 * 18)


LATENT = {"architecture": "deepseek", "plain_head_dim": 12, "rope_head_dim": 6, "value_head_dim": 18}
"""Values as wide as keys, which attention on the meta device takes."""


@pytest.mark.parametrize(
    "settings",
    [
        {"architecture": "llama", "mtp_layers": 1},
        {"architecture": "llama", "mtp_layers": 3, "tie_embeddings": True},
        LATENT,
        {**LATENT, "query_rank": 7, "mtp_layers": 2},
    ],
    ids=["further", "further, tied", "latent", "latent, further"],
)
def test_operations_are_those_of_torchs_counter(settings: dict[str, object]) -> None:
    config = filled(33, num_layers=3, hidden_size=36, num_attention_heads=3, vocab_size=101, **settings)
    with torch.device("meta"):
        model, tokens = make_model(config), torch.zeros(2, 33, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    assert counter.get_total_flops() == tokens.numel() * model_flops_per_token(config, 33)


@pytest.mark.parametrize("narrow", [0, 14, 64])
def test_latents_are_known_from_the_shapes_of_weights(narrow: int) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "plain_head_dim": 12, "rope_head_dim": 6, "mtp_layers": 2}
    sizes |= {"value_head_dim": 10, "key_value_rank": 58, "query_rank": narrow}  # 58 + 6 are the width of the model
    config = filled(32, architecture="deepseek", num_layers=2, vocab_size=100, **sizes)
    described = describe_model(config, 32)
    first, last = block_shapes(described)
    assert first == last
    assert further_blocks(described) == (last, last)
    assert (last.heads, last.key_heads, last.head_dim, last.value_dim, last.norms) == (4, 4, 18, 10, 2)
    assert last.latents == Latents(queries=narrow, keys=58, rotary=6, value=10)


TRAINS = {
    "adapters": {"adapter": {"rank": 3}},
    "adapters of all": {"adapter": {"rank": 5, "targets": ["**"]}},
    "adapters of values": {"adapter": {"rank": 2, "targets": ["blocks.1.attn.*", "blocks.2.mlp.down"]}},
    "upper blocks": {"optimizer": {"frozen": ["embed", "blocks.0", "blocks.1.attn"]}},
    "parts": {"optimizer": {"frozen": ["blocks.1.mlp.down", "head.output", "blocks.*.attn.proj.weight"]}},
    "head": {"optimizer": {"frozen": ["embed", "blocks.*"]}},
}


@pytest.mark.parametrize("trains", TRAINS)
@pytest.mark.parametrize(
    "model", [{"architecture": "gpt"}, {"architecture": "llama", "num_key_value_heads": 3}, LATENT]
)
def test_frozen_products_have_no_gradients_and_a_backward_pass_is_as_deep_as_needed(
    model: dict[str, object], trains: str
) -> None:
    sizes = {"num_layers": 3, "hidden_size": 36, "num_attention_heads": 3, "vocab_size": 101, "tie_embeddings": False}
    given = {"data": {"path": "unused", "sequence_length": 33}, "model": {**sizes, **model}, **TRAINS[trains]}
    config = resolve(Config.model_validate(given), 101)
    make, plan = ConfigSource().load(config)
    with torch.device("meta"):
        built, tokens = make(), torch.zeros(2, 33, dtype=torch.int64)
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(name not in plan.frozen)
    with FlopCounterMode(display=False) as counter:
        built(tokens, tokens).backward()
    counted, of_step = counter.get_total_flops(), tokens.numel() * flops_per_token(config)
    # Of latents, the keys' product counts as reached by the queries' adapter in the first block.
    assert counted <= of_step <= counted * (1.03 if model is LATENT and trains == "adapters" else 1)


def test_a_model_of_ones_own_tells_none() -> None:
    assert model_flops_per_token(ModelConfig.model_validate({"architecture": "own", "file": "model.py"}), 32) is None


def test_it_needs_no_torch() -> None:
    code = "import sys, threefold.planner.block; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

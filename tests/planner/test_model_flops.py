"""Model FLOPs: equal to the formulas and the published figures of Megatron-LM, and without torch."""

import subprocess
import sys

import pytest

from threefold.config import ModelConfig
from threefold.planner.block import UnknownBlock, block_shapes, describe_model, model_flops_per_token


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


@pytest.mark.parametrize(("narrow", "named"), [(0, "attn.kv_down"), (14, "attn.q_down.weight and attn.kv_down")])
def test_the_planner_refuses_latent_attention_by_name(narrow: int, named: str) -> None:
    config = filled(32, architecture="deepseek", num_layers=1, vocab_size=100, query_rank=narrow)
    with pytest.raises(UnknownBlock) as caught:
        block_shapes(describe_model(config, 32))
    assert f"blocks.0 has {named}.weight besides" in str(caught.value)


def test_a_model_of_ones_own_tells_none() -> None:
    assert model_flops_per_token(ModelConfig.model_validate({"architecture": "own", "file": "model.py"}), 32) is None


def test_it_needs_no_torch() -> None:
    code = "import sys, threefold.planner.block; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

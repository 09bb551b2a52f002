"""Configs, and hardware that reaches its peaks, so that seconds are operations or bytes by hand."""

from dataclasses import replace
from typing import Any

from threefold.config import Config, resolve
from threefold.config.loading import config_of
from threefold.planner.hardware import Achievable, Hardware, Link, find_hardware

RATE = 1e12
PERFECT = Achievable(
    matrix=1,
    matrix_depth=0,
    attention=1,
    attention_backward=1,
    attention_length=0,
    attention_depth=0,
    memory=1,
    link=1,
    network=1,
    kernel=0,
    step=0,
)
FREE = Link(1e30, 0.0)


def ideal(**changes: Any) -> Hardware:
    """A GPU of 1 TFLOP/s, with memory and links that take no time unless they are given."""
    base = replace(
        find_hardware("h100"),
        name="ideal",
        matrix_rates=dict.fromkeys(("bf16", "fp16", "fp32"), RATE),
        memory_bandwidth=1e30,
        multiprocessors=1,
        inside=FREE,
        between=FREE,
        achievable=PERFECT,
    )
    return replace(base, **changes)


GPT = {"architecture": "gpt", "num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1024}
LLAMA = {
    "architecture": "llama",
    "num_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "ffn_hidden_size": 1024,
    "vocab_size": 1024,
}


def config(model: dict[str, Any] = GPT, train: dict[str, Any] | None = None, **parallel: Any) -> Config:
    """A resolved config of a small model."""
    sections = {
        "data": {"path": "tokens", "sequence_length": 256},
        "model": model,
        "parallel": parallel,
        "train": {"micro_batch_size": 1, "global_batch_size": 32, **(train or {})},
        "precision": {"dtype": "bf16"},
    }
    return resolve(config_of(sections), 1)

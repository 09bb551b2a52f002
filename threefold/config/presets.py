"""Published sizes of GPT-2 and GPT-3.

GPT-2: Radford et al. 2019 and the released weights. GPT-3: Brown et al. 2020, table 2.1, with two slips of that table
mended as everyone does: 1.3B has 16 heads (24 do not divide its width), 13B has width 5120 (40 heads of 128).
"""

from typing import Any, Literal

PresetName = Literal[
    "gpt2-124m",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "gpt3-125m",
    "gpt3-350m",
    "gpt3-760m",
    "gpt3-1.3b",
    "gpt3-2.7b",
    "gpt3-6.7b",
    "gpt3-13b",
    "gpt3-175b",
]


def _gpt(num_layers: int, hidden_size: int, num_attention_heads: int, max_position_embeddings: int) -> dict[str, Any]:
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "max_position_embeddings": max_position_embeddings,
        "vocab_size": 50257,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-124m": _gpt(12, 768, 12, 1024),
    "gpt2-medium": _gpt(24, 1024, 16, 1024),
    "gpt2-large": _gpt(36, 1280, 20, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 1024),
    "gpt3-125m": _gpt(12, 768, 12, 2048),
    "gpt3-350m": _gpt(24, 1024, 16, 2048),
    "gpt3-760m": _gpt(24, 1536, 16, 2048),
    "gpt3-1.3b": _gpt(24, 2048, 16, 2048),
    "gpt3-2.7b": _gpt(32, 2560, 32, 2048),
    "gpt3-6.7b": _gpt(32, 4096, 32, 2048),
    "gpt3-13b": _gpt(40, 5120, 40, 2048),
    "gpt3-175b": _gpt(96, 12288, 96, 2048),
}
"""Settings of `model` by preset."""

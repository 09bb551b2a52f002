"""Published sizes of well-known models.

GPT-2: Radford et al. 2019 and the released weights. GPT-3: Brown et al. 2020, table 2.1, with the usual corrections of
two misprints: 1.3B has 16 heads (24 do not divide its width), 13B has width 5120 (40 heads of 128). Llama and its
successors: the `config.json` published with the weights. The experts' auxiliary loss weights are left to the run.
"""

from typing import TYPE_CHECKING, Any, Literal

Sizes = dict[str, Any]


def _gpt(num_layers: int, hidden_size: int, num_attention_heads: int, max_position_embeddings: int) -> Sizes:
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "max_position_embeddings": max_position_embeddings,
        "vocab_size": 50257,
    }


def _llama(layers: int, hidden: int, heads: tuple[int, int], ffn: int, **others: Any) -> Sizes:
    """Build the sizes of a Llama-style model; `heads` counts query heads, then key and value heads."""
    return {
        "architecture": "llama",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 128,
        "ffn_hidden_size": ffn,
        **others,
    }


def _common(positions: int, vocabulary: int, theta: float, eps: float, tied: bool = False, **others: Any) -> Sizes:
    return {
        "max_position_embeddings": positions,
        "vocab_size": vocabulary,
        "rope_theta": theta,
        "norm_eps": eps,
        **others,
        "tie_embeddings": tied,
    }


_ROPE_3 = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_positions": 8192}
_ROPE_3 |= {"rope_low_frequency_factor": 1.0, "rope_high_frequency_factor": 4.0}
_LLAMA_2 = _common(4096, 32000, 10000.0, 1e-5)
_LLAMA_3 = _common(8192, 128256, 500000.0, 1e-5)
_LLAMA_3_1 = {**_LLAMA_3, "max_position_embeddings": 131072, **_ROPE_3}
_LLAMA_3_2 = {**_LLAMA_3_1, "rope_factor": 32.0, "tie_embeddings": True}
_QWEN_2 = _common(131072, 151936, 1000000.0, 1e-6, tied=True, qkv_bias=True)
_QWEN_2_7B = {**_QWEN_2, "vocab_size": 152064, "tie_embeddings": False}
_QWEN_3 = _common(40960, 151936, 1000000.0, 1e-6, tied=True, qk_norm=True)
_QWEN_3_UNTIED = {**_QWEN_3, "tie_embeddings": False}
_MISTRAL = _common(32768, 32768, 1000000.0, 1e-5)
_MISTRAL_1 = _common(32768, 32000, 10000.0, 1e-5)
_MIXTRAL = {**_MISTRAL, "vocab_size": 32000, "num_experts": 8, "experts_per_token": 2, "normalize_expert_weights": True}
_QWEN_1_5_MOE = {
    **_common(8192, 151936, 1000000.0, 1e-6, qkv_bias=True),
    "num_experts": 60,
    "experts_per_token": 4,
    "expert_ffn_hidden_size": 1408,
    "shared_expert_ffn_hidden_size": 5632,
    "shared_expert_gate": True,
    "normalize_expert_weights": False,
}
_QWEN_3_MOE = {**_QWEN_3_UNTIED, "num_experts": 128, "experts_per_token": 8, "expert_ffn_hidden_size": 768}
_QWEN_3_MOE |= {"normalize_expert_weights": True}

FAMILIES: dict[str, dict[str, Sizes]] = {
    "GPT-2 and GPT-3": {
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
    },
    "Llama 2": {
        "llama-2-7b": _llama(32, 4096, (32, 32), 11008, **_LLAMA_2),
        "llama-2-13b": _llama(40, 5120, (40, 40), 13824, **_LLAMA_2),
        "llama-2-70b": _llama(80, 8192, (64, 8), 28672, **_LLAMA_2),
    },
    "Llama 3": {
        "llama-3-8b": _llama(32, 4096, (32, 8), 14336, **_LLAMA_3),
        "llama-3-70b": _llama(80, 8192, (64, 8), 28672, **_LLAMA_3),
    },
    "Llama 3.1 and 3.2": {
        "llama-3.1-8b": _llama(32, 4096, (32, 8), 14336, **_LLAMA_3_1),
        "llama-3.2-1b": _llama(16, 2048, (32, 8), 8192, **{**_LLAMA_3_2, "head_dim": 64}),
        "llama-3.2-3b": _llama(28, 3072, (24, 8), 8192, **_LLAMA_3_2),
    },
    "Qwen2, and Qwen2.5 of these sizes": {
        "qwen2-0.5b": _llama(24, 896, (14, 2), 4864, **{**_QWEN_2, "head_dim": 64}),
        "qwen2-1.5b": _llama(28, 1536, (12, 2), 8960, **_QWEN_2),
        "qwen2-7b": _llama(28, 3584, (28, 4), 18944, **_QWEN_2_7B),
    },
    "Qwen3": {
        "qwen3-0.6b": _llama(28, 1024, (16, 8), 3072, **_QWEN_3),
        "qwen3-1.7b": _llama(28, 2048, (16, 8), 6144, **_QWEN_3),
        "qwen3-4b": _llama(36, 2560, (32, 8), 9728, **_QWEN_3),
        "qwen3-8b": _llama(36, 4096, (32, 8), 12288, **_QWEN_3_UNTIED),
        "qwen3-14b": _llama(40, 5120, (40, 8), 17408, **_QWEN_3_UNTIED),
        "qwen3-32b": _llama(64, 5120, (64, 8), 25600, **_QWEN_3_UNTIED),
    },
    "Mistral": {
        "mistral-7b-v0.1": _llama(32, 4096, (32, 8), 14336, **_MISTRAL_1, sliding_window=4096),
        "mistral-7b-v0.3": _llama(32, 4096, (32, 8), 14336, **_MISTRAL),
    },
    "Mixtures of experts": {
        "mixtral-8x7b": _llama(32, 4096, (32, 8), 14336, **_MIXTRAL),
        "qwen1.5-moe-a2.7b": _llama(24, 2048, (16, 16), 5632, **_QWEN_1_5_MOE),
        "qwen3-30b-a3b": _llama(48, 2048, (32, 4), 6144, **_QWEN_3_MOE),
    },
}
"""Family → preset → settings of `model`."""

PRESETS: dict[str, Sizes] = {name: sizes for family in FAMILIES.values() for name, sizes in family.items()}
"""Preset → settings of `model`."""

if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(PRESETS)]

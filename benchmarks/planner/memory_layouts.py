"""Layouts for comparing the planner's memory with dry runs: realistic sizes, every kind of parallelism."""

from dataclasses import dataclass, field
from typing import Any

from threefold.config import Config, resolve


@dataclass(frozen=True)
class LayoutCase:
    """Model and layout of one run.

    Attributes:
        parallel: sizes and settings that are not 1 or false.
        batch: samples of a micro-batch.
        sequence: tokens of a sample.
        dtype: value of `precision.dtype`.
        train: further settings.
    """

    name: str
    model: dict[str, Any]
    parallel: dict[str, Any]
    batch: int = 1
    count: int = 1
    sequence: int = 2048
    dtype: str = "bf16"
    train: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        given = {
            "data": {"path": "unused", "sequence_length": self.sequence},
            "model": {"max_position_embeddings": self.sequence, **self.model},
            "parallel": self.parallel,
            "train": {
                "micro_batch_size": self.batch,
                "gradient_accumulation_steps": self.count,
                "device": "cpu",
                **self.train,
            },
            "precision": {"dtype": self.dtype},
        }
        return resolve(Config.model_validate(given), self.model["vocab_size"])

    @property
    def layout(self) -> str:
        axes = [f"{name} {value}".replace(" True", "") for name, value in self.parallel.items()]
        extra = [f"{name} {value}" for name, value in self.train.items()]
        return ", ".join([*axes, *extra, self.dtype, f"{self.count} × {self.batch} × {self.sequence}"])


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, **more: Any) -> dict[str, Any]:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocab}
    return sizes | more


def llama(layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    more = {"architecture": "llama", "num_key_value_heads": groups, "ffn_hidden_size": ffn, **more}
    return gpt(layers, hidden, heads, vocab, **more)


_GPT_7B = gpt(36, 4096, 32)
_GPT_22B = gpt(48, 6144, 64)
_GPT_175B = gpt(96, 12288, 96)
_LLAMA_8B = llama(32, 4096, 32, 8, 14336, 128256)
_LLAMA_13B = llama(40, 5120, 40, 40, 13824, 32000)
_LLAMA_70B = llama(80, 8192, 64, 8, 28672, 128256)
_MIXTRAL = llama(32, 4096, 32, 8, 14336, 32000, num_experts=8, experts_per_token=2, expert_ffn_hidden_size=14336)
_QWEN = llama(
    48, 2048, 32, 4, 6144, 151936, head_dim=128, qk_norm=True, num_experts=128, experts_per_token=8,
    expert_ffn_hidden_size=768,
)  # fmt: skip
_SHARED = llama(
    24, 2048, 16, 16, 5632, 151936, num_experts=60, experts_per_token=4, expert_ffn_hidden_size=1408,
    shared_expert_ffn_hidden_size=5632, shared_expert_gate=True, qkv_bias=True,
)  # fmt: skip
_DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
_SP: dict[str, Any] = {"sequence_parallel": True}
_FULL, _SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}

CASES = (
    LayoutCase("GPT 7.5B", _GPT_7B, {"tp": 4}, batch=4),
    LayoutCase("GPT 7.5B", _GPT_7B, {"tp": 4, **_SP}, batch=4),
    LayoutCase("GPT 7.5B", _GPT_7B, {"tp": 4, **_SP}, batch=8, train=_SELECTIVE),
    LayoutCase("GPT 7.5B", _GPT_7B, {"tp": 4}, batch=16, train=_FULL),
    LayoutCase("GPT 7.5B", _GPT_7B, {"tp": 8}, dtype="fp32", batch=4),
    LayoutCase("GPT 7.5B", _GPT_7B, {"dp": 4, "zero": 1, "tp": 2}, batch=2, count=2),
    LayoutCase("GPT 7.5B", _GPT_7B, {"dp": 8, "zero": 2}, batch=2, count=2),
    LayoutCase("GPT 7.5B", _GPT_7B, {"dp": 8, "zero": 3}, batch=2, count=2),
    LayoutCase("GPT 7.5B", _GPT_7B, {"dp": 8, "zero": 3}, batch=4, train=_FULL),
    LayoutCase("GPT 7.5B", _GPT_7B, {"dp": 8, "zero": 3}, batch=2, count=2, dtype="fp32"),
    LayoutCase("GPT 7.5B", gpt(36, 4096, 32, **_DROPOUT), {"tp": 4, **_SP}, batch=2, train=_SELECTIVE),
    LayoutCase("GPT 7.5B", gpt(36, 4096, 32, **_DROPOUT), {"tp": 8}, batch=1),
    LayoutCase("GPT 7.5B", gpt(36, 4096, 32, **_DROPOUT), {"tp": 4, "pp": 2}, count=4, train=_FULL),
    LayoutCase("GPT 7.5B", gpt(36, 4096, 32, position_embedding="rope"), {"cp": 4, "tp": 2}, sequence=8192),
    LayoutCase("GPT 7.5B", _GPT_7B, {"pp": 4, "tp": 2}, count=8, dtype="fp16"),
    LayoutCase("GPT 7.5B", _GPT_7B, {"pp": 4, "tp": 2, "schedule": "gpipe"}, count=8, train=_FULL),
    LayoutCase("GPT 7.5B", _GPT_7B, {"pp": 4, "tp": 2, "schedule": "interleaved", "stage_chunks": 3}, count=8),
    LayoutCase("GPT 7.5B", _GPT_7B, {"pp": 4, "tp": 2, "schedule": "zero-bubble", "stage_chunks": 1}, count=8),
    LayoutCase("GPT 7.5B", _GPT_7B, {"pp": 4, "tp": 2, "schedule": "zero-bubble", "stage_chunks": 2}, count=8),
    LayoutCase("GPT 7.5B", _GPT_7B, {"pp": 4, "tp": 2, "schedule": "zbv"}, count=8),
    LayoutCase("GPT 7.5B", _GPT_7B, {"pp": 4, "tp": 2, "schedule": "dualpipev"}, count=8),
    LayoutCase("GPT 7.5B", _GPT_7B, {"pp": 4, "tp": 2, "schedule": "looped-bfs"}, count=8, train=_FULL),
    LayoutCase("GPT 22B", _GPT_22B, {"tp": 8}, batch=4, train=_FULL),
    LayoutCase("GPT 22B", _GPT_22B, {"tp": 8, **_SP}, batch=4, train=_SELECTIVE),
    LayoutCase("GPT 22B", _GPT_22B, {"tp": 8, **_SP}, batch=4, train={"recompute": "full", "recompute_every": 2}),
    LayoutCase("GPT 175B", _GPT_175B, {"tp": 8, "pp": 8}, count=16, train=_FULL),
    LayoutCase("GPT 175B", _GPT_175B, {"tp": 8, "pp": 8, **_SP}, count=16, train=_SELECTIVE),
    LayoutCase("GPT 175B", _GPT_175B, {"tp": 8, "pp": 8, "schedule": "interleaved", "stage_chunks": 3}, count=16),
    LayoutCase("GPT 175B", _GPT_175B, {"tp": 8, "pp": 12, "dp": 2, "zero": 1, **_SP}, count=24, train=_FULL),
    LayoutCase("GPT 175B", _GPT_175B, {"tp": 8, "pp": 8, "schedule": "zbv", **_SP}, count=16),
    LayoutCase("Llama 8B", _LLAMA_8B, {"dp": 8, "zero": 3}, sequence=8192, train=_FULL),
    LayoutCase("Llama 8B", _LLAMA_8B, {"dp": 8, "zero": 3}, sequence=4096, count=2, train=_SELECTIVE),
    LayoutCase("Llama 8B", _LLAMA_8B, {"dp": 8, "zero": 2, "zero_shards": 4}, sequence=4096, train=_FULL),
    LayoutCase("Llama 8B", _LLAMA_8B, {"dp": 4, "zero": 1, "tp": 2, **_SP}, sequence=4096),
    LayoutCase("Llama 8B", _LLAMA_8B, {"tp": 8, **_SP}, sequence=8192),
    LayoutCase("Llama 8B", _LLAMA_8B, {"tp": 8}, sequence=4096, dtype="fp32"),
    LayoutCase("Llama 8B", _LLAMA_8B, {"cp": 4, "tp": 2}, sequence=16384, train=_FULL),
    LayoutCase("Llama 8B", _LLAMA_8B, {"pp": 4}, sequence=4096, count=8),
    LayoutCase("Llama 8B", _LLAMA_8B, {"pp": 4, "schedule": "zbv"}, sequence=4096, count=8, train=_FULL),
    LayoutCase("Llama 13B", _LLAMA_13B, {"tp": 2, "pp": 2, **_SP}, count=8),
    LayoutCase("Llama 13B", _LLAMA_13B, {"tp": 4, "pp": 2}, batch=2, count=8, train=_FULL),
    LayoutCase("Llama 13B", _LLAMA_13B, {"tp": 1, "pp": 8}, count=16),
    LayoutCase("Llama 70B", _LLAMA_70B, {"tp": 8, "pp": 4, **_SP}, sequence=4096, count=8, train=_FULL),
    LayoutCase("Llama 70B", _LLAMA_70B, {"tp": 8, "pp": 8, **_SP}, sequence=4096, count=16),
    LayoutCase("Llama 70B", _LLAMA_70B, {"tp": 8, "dp": 4, "zero": 3, **_SP}, sequence=4096, train=_FULL),
    LayoutCase("Llama 70B", _LLAMA_70B, {"tp": 8, "pp": 4, "cp": 2, **_SP}, sequence=8192, count=8, train=_FULL),
    LayoutCase("Mixtral 8×7B", _MIXTRAL, {"tp": 8, **_SP}, sequence=4096),
    LayoutCase("Mixtral 8×7B", _MIXTRAL, {"dp": 8, "ep": 8, "pp": 2}, sequence=4096, count=4, train=_FULL),
    LayoutCase("Mixtral 8×7B", _MIXTRAL, {"dp": 8, "ep": 4, "zero": 1, "tp": 2}, sequence=4096),
    LayoutCase("Mixtral 8×7B", _MIXTRAL, {"dp": 8, "ep": 8, "zero": 3, "tp": 2, **_SP}, sequence=4096),
    LayoutCase("Mixtral 8×7B", _MIXTRAL, {"tp": 4, "pp": 4}, count=8),
    LayoutCase("Qwen3 30B-A3B", _QWEN, {"dp": 8, "ep": 8}, sequence=4096),
    LayoutCase("Qwen3 30B-A3B", _QWEN, {"dp": 8, "ep": 8, "pp": 2}, sequence=4096, count=4, train=_FULL),
    LayoutCase("Qwen1.5 MoE", _SHARED, {"tp": 4, **_SP}, sequence=4096, train=_FULL),
    LayoutCase("Qwen1.5 MoE", _SHARED, {"dp": 4, "ep": 4, "zero": 2}, sequence=4096),
)

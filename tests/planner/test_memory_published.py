"""Memory against published peaks, and against which published steps ran out of memory."""

import pytest

from benchmarks.planner.memory import judged, published
from threefold.config import Config, resolve
from threefold.planner.activations import block_bytes
from threefold.planner.block import BlockShape
from threefold.planner.rank_block import RankBlock
from threefold.planner.stage_memory import stage_memory
from threefold.planner.systems import Kernels

MEGATRON = Kernels(fused_softmax=True, mask_bytes=1, wide_statistics=True)


def test_published_peaks() -> None:
    for peak in published():
        assert abs(peak.error) <= 0.05, peak


@pytest.mark.slow
def test_which_published_steps_fit() -> None:
    ran, refused, failed, missed = judged()
    assert ran > 400 < failed + 100
    assert refused / ran <= 0.06
    assert missed / failed <= 0.13


def test_the_activations_of_korthikanti() -> None:
    """Bytes per layer of arXiv 2205.05198, table 2, but for the numbers that norms keep for each token."""
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    block = BlockShape(hidden=h, heads=a, key_heads=a, head_dim=h // a, ffn=4 * h, hidden_dropout=True)

    def kept(recompute: str = "none", **more: object) -> float:
        sizes = RankBlock(**vars(block), samples=b, length=s, attention="dropped", kernels=MEGATRON, **more)  # type: ignore[arg-type]
        statistics = 0 if recompute == "full" else 4 * sizes.local_tokens * 4
        return (block_bytes(sizes, recompute) - statistics) / (s * b * h)

    assert kept() == pytest.approx(34 + 5 * a * s / h)
    assert kept(tp=t) == pytest.approx(10 + 24 / t + 5 * a * s / (h * t))
    assert kept(tp=t, sequence_parallel=True) == pytest.approx((34 + 5 * a * s / h) / t)
    assert kept("selective", tp=t, sequence_parallel=True) == 34 / t
    assert kept("full") == 2


def test_systems_keep_different_things() -> None:
    model = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 4096}
    llama = {**model, "architecture": "llama"}

    def peak(system: str, which: dict[str, object] = model, **sections: object) -> int:
        given = {"data": {"path": "unused", "sequence_length": 1024}, "model": which, "precision": {"dtype": "bf16"}}
        train = {"train": {"micro_batch_size": 2, "gradient_accumulation_steps": 2}}
        config = resolve(Config.model_validate({**given, **train, **sections}), 4096)
        return stage_memory(config, "cuda", system)[0].peak

    assert peak("megatron-2022") > peak("megatron-core")
    assert peak("llama-2023-plain-norm", llama) > peak("llama-2023", llama) > peak("megatron-core", llama)
    shared = {"parallel": {"dp": 8}}
    assert peak("nemo", **shared) < peak("megatron-core", **shared)

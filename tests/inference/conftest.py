"""Runs of a few steps of small models, one for each kind of position and attention."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.inference.support import FAMILIES
from tests.train.support import Run, train_rank, write_tokens
from threefold.inference.model import Trained
from threefold.verify.worker_pool import WorkerPool

KINDS: dict[str, dict[str, Any]] = {
    "learned": {},
    "rope": {"position_embedding": "rope"},
    # grouped heads, scores with a cap and sinks, a window in the second and third layer, weights that are not tied
    "llama": {
        "architecture": "llama",
        "num_key_value_heads": 2,
        "sliding_window": 5,
        "full_attention_layers": 1,
        "attention_softcap": 1.0,
        "attention_sinks": True,
    },
    # sliding and full layers with other angles, norms of outputs and over the width, gates, partial rotation, caps
    "blocks": {
        "architecture": "llama",
        "num_key_value_heads": 2,
        "sliding_window": 5,
        "attention_pattern": "1 sliding : 1 full",
        "sliding_rope_theta": 50.0,
        "rotary_share": 0.7,
        "qk_norm": True,
        "qk_norm_over": "width",
        "attention_gate": True,
        "norm_position": "both",
        "norm_offset": True,
        "embedding_scale": 2.0,
        "logit_softcap": 3.0,
    },
    # latents, YaRN with a factor of the scores, values narrower than keys
    "latent": {
        "architecture": "deepseek",
        "query_rank": 7,
        "key_value_rank": 9,
        "value_head_dim": 5,
        "rope_scaling": "yarn",
        "rope_factor": 2.0,
        "rope_mscale_all_dim": 0.7,
    },
    "experts": {"architecture": "llama", "num_experts": 4, "expert_ffn_hidden_size": 16, "expert_capacity_factor": 1.0},
}


@pytest.fixture(scope="session")
def runs(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run folder of a kind, trained at the first call, with an uneven vocabulary; `learned` on tp 2 · pp 2."""
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("runs")
    texts = [text[:400] for _, text in sorted(topics.items())][:60]
    plain = Run(write_tokens(folder / "tokens", texts), steps=2)
    done: set[str] = set()

    def run_of(kind: str) -> Path:
        if kind not in done:
            done.add(kind)
            axes = 2 if kind == "learned" else 1
            given = KINDS[kind] if kind in KINDS else {"architecture": kind, **FAMILIES[kind]}
            # wide initial weights, or greedy generation says one thing again and again
            settings = tuple((f"model.{key}", value) for key, value in {**given, "initializer_range": 0.2}.items())
            pool.run(axes * axes, train_rank, plain.but(tp=axes, pp=axes, set=settings), folder / kind)
        return folder / kind

    return run_of


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of a model this small wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=KINDS)
def trained(request: pytest.FixtureRequest, runs: Callable[[str], Path]) -> Trained:
    """Each kind in turn."""
    return Trained.find(runs(request.param))

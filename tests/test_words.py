"""The words of the package: what someone of this field searches for leads to the file that does it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHERE = {
    "KV cache": "inference/kv_cache.py",
    "activation checkpointing": "parallel/recompute.py",
    "attention mask": "models/layers/attention.py",
    "GQA": "models/layers/attention.py",
    "QK-norm": "models/llama/model.py",
    "reduce-scatter": "comm/axis.py",
    "all-to-all": "parallel/expert/experts.py",
    "resume": "train/start.py",
    "callback": "train/callbacks/base.py",
    "sampler": "random/permutation.py",
    "tied embeddings": "parallel/pipeline/tied.py",
    "load balancing loss": "models/layers/router.py",
    "gradient accumulation": "parallel/pipeline/runner.py",
    "gradient buckets": "parallel/data/grad_buckets.py",
    "ring attention": "parallel/context/ring_attention.py",
    "loss scaling": "train/loss_scale.py",
    "chat template": "data/chat/chat_template.py",
    "early stopping": "",
}
"""A term → the file that does it, in the package."""


def hits(term: str) -> list[str]:
    """The files of the package that have a term, the most often first: how an editor's search lists them."""
    found = {
        str(path.relative_to(ROOT / "threefold")): len(re.findall(re.escape(term), path.read_text(), re.IGNORECASE))
        for path in (ROOT / "threefold").rglob("*.py")
    }
    return sorted((path for path, count in found.items() if count), key=lambda path: (-found[path], path))

"""A config that trains a tiny model."""

from pathlib import Path

import pytest


@pytest.fixture
def config_file(tmp_path: Path, tokens: Path) -> Path:
    """A config that trains a tiny model on `tokens` for four steps."""
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"data: {{path: {tokens}, sequence_length: 16, split: '8,2'}}\n"
        "model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4}\n"
        "train: {max_steps: 4, global_batch_size: 4, eval_every: 2, eval_batches: 1, device: cpu}\n"
        "checkpoint: {every: 2}\n"
    )
    return path

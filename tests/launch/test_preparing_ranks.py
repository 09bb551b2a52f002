"""What ranks that are forked find ready: the imports of a run, which no garbage collection looks at again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import gc, json, os, sys
from pathlib import Path
from unittest.mock import patch
from threefold.config import load_config
from threefold.launch import training_run
from threefold.launch.training_run import train_as_rank

def noting(info, *args):
    there, kept = set(sys.modules), gc.get_freeze_count()
    ended = train_as_rank(info, *args)
    imported = [name for name in sys.modules if name not in there and name.startswith("threefold.")]
    found = [kept, gc.isenabled(), imported, os.environ.get("RES_OPTIONS")]
    (folder / f"rank_{info.rank}").write_text(json.dumps(found))
    return ended

if __name__ == "__main__":
    config, folder = map(Path, sys.argv[1:])
    run = training_run.prepare_training(load_config(config), folder / "run")
    with patch.object(training_run, "train_as_rank", noting):
        run.start(())
    print(gc.get_freeze_count(), gc.isenabled())
"""


@pytest.mark.slow
def test_ranks_of_a_run_import_nothing(tmp_path: Path, tokens: Path) -> None:
    config, script = tmp_path / "tiny.yaml", tmp_path / "noting.py"
    config.write_text(
        f"data: {{path: {tokens}, sequence_length: 16, split: '8,2'}}\n"
        "model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4}\n"
        "train: {max_steps: 2, global_batch_size: 4, eval_every: 2, eval_batches: 1, device: cpu}\n"
        "checkpoint: {every: 2}\n"
        "parallel: {tp: 2}\n"
    )
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(config), str(tmp_path)]
    ended = subprocess.run(command, env=os.environ, text=True, capture_output=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["0", "True"], "afterwards the process that started them is as before"
    for rank in range(2):
        kept, collects, imported, lookups = json.loads((tmp_path / f"rank_{rank}").read_text())
        assert kept > 300_000, "a rank's first collection copies the memory that it shares with its parent"
        assert collects
        assert imported == [], "each rank imports what one process could have imported for all"
        assert lookups == "timeout:1 attempts:2", "without a network, a rank waits 10 s for the name of 127.0.0.1"

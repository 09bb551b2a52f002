"""Whole runs on a GPU beside those on the CPU: commands, checkpoints that change device, generation."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ready
from tests.support.devices import DEVICES
from tests.train.support import losses_of, same

SETTINGS = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "data.sequence_length=16",
    "train.global_batch_size=8",
    "train.eval_every=0",
    "optimizer.eps=1e-5",
    "optimizer.warmup_steps=2",
    "optimizer.decay_steps=20",
    "checkpoint.every=2",
)
ROOT = Path(__file__).parents[2]


def command(device: str, *arguments: str | Path) -> str:
    """`threefold ARGUMENTS…` in a process of its own, which may initialise CUDA; returns what it printed."""
    call = [sys.executable, "-m", "threefold", *map(str, arguments)]
    ended = ready.run(call) if device == "cpu" else subprocess.run(call, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def train(tokens: Path, run_dir: Path, device: str, steps: int, *options: str) -> None:
    config = run_dir.parent / f"{run_dir.name}.yaml"
    config.write_text(f"data: {{path: {tokens}}}\n")
    chosen = (*SETTINGS, f"train.device={device}", f"train.max_steps={steps}")
    command(
        device, "train", config, "--run-dir", run_dir, *(each for key in chosen for each in ("--set", key)), *options
    )


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_goes_from_the_cpu_to_the_device_and_back(tmp_path: Path, tokens: Path, device: str) -> None:
    """The losses are those of a run that stays on the CPU, as are the bits that it writes."""
    train(tokens, tmp_path / "stays", "cpu", 6)
    train(tokens, tmp_path / "moves", "cpu", 2)
    train(tokens, tmp_path / "moves", device, 4, "--resume")
    train(tokens, tmp_path / "moves", "cpu", 6, "--resume")
    assert same(losses_of(tmp_path / "moves"), losses_of(tmp_path / "stays"), "fp32")
    texts = {
        command(
            where, "generate", tmp_path / "moves", "--device", where, "--prompt", "Document 12", "--temperature", "0"
        )
        for where in ("cpu", device)
    }
    assert len(texts) == 1, f"a greedy continuation on {device} differs from that on the CPU"


@pytest.mark.sweep
@pytest.mark.parametrize("device", DEVICES)
def test_the_config_of_the_demo(tmp_path: Path, tokens: Path, device: str) -> None:
    """Its eight ranks as one on a GPU, which are the same run."""
    few = (
        "parallel.dp=1",
        "parallel.tp=1",
        "parallel.pp=1",
        "train.max_steps=3",
        "train.eval_every=0",
        "train.exact=false",
    )
    runs = []
    for where in ("cpu", device):
        runs.append(tmp_path / f"on-{where}-{len(runs)}")
        chosen = (*few, f"data.path={tokens}", "data.sequence_length=32", f"train.device={where}")
        options = [each for key in chosen for each in ("--set", key)]
        command(where, "train", ROOT / "examples" / "demo.yaml", "--run-dir", runs[-1], *options)
    assert same(losses_of(runs[1]), losses_of(runs[0]), "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_ranks_that_share_a_device_over_gloo(tmp_path: Path, tokens: Path, device: str) -> None:
    """`parallel.backend: gloo` from the command line: four ranks, as one."""
    train(tokens, tmp_path / "one", "cpu", 3)
    layout = ("parallel.dp=2", "parallel.pp=2", "parallel.zero=1", "parallel.backend=gloo")
    train(tokens, tmp_path / "four", device, 3, *(each for key in layout for each in ("--set", key)))
    assert same(losses_of(tmp_path / "four"), losses_of(tmp_path / "one"), "fp32")

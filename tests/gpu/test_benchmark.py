"""The benchmark for one GPU runs at tiny sizes on a CPU, so that an hour with a GPU is spent measuring."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.devices import DEVICES
from threefold.launch.device import gpu_count

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def rows_of(device: str, *options: str) -> dict[tuple[str, str], list[str]]:
    """The cells of each row of the table, by model and contestant."""
    call = [sys.executable, SCRIPT, "--device", device, "--tiny", "--rounds", "1", "--steps", "2", *options]
    ended = subprocess.run(call, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {(row[0], row[2]): row for row in rows}


def check(rows: dict[tuple[str, str], list[str]]) -> None:
    for name, (_, sequence, _, micro_batch, rate, share, times, peak, estimate, dry_run) in rows.items():
        assert (sequence, micro_batch) == ("32", "4"), name
        assert float(rate.replace(",", "")) > 0
        assert float(share.removesuffix(" %")) >= 0
        assert float(peak) >= 0
        own = name[1].startswith("Threefold")
        assert bool(times) == bool(estimate) == bool(dry_run) == own


@pytest.mark.sweep
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_every_contestant(device: str) -> None:
    rows = rows_of(device, "--models", "gpt2-124m", "--ways", "eager", "--dtype", "fp32")
    assert {name for _, name in rows} == {"Threefold, eager", "transformers, eager", "plain module, eager"}
    check(rows)


@pytest.mark.sweep
@pytest.mark.parametrize("device", DEVICES)
def test_each_model_eager_and_compiled(device: str) -> None:
    rows = rows_of(device, "--models", "llama-3.2-1b", "gpt3-1.3b")
    assert {model for model, _ in rows} == {"llama-3.2-1b", "gpt3-1.3b"}
    assert {name for _, name in rows} >= {"Threefold, eager", "Threefold, compiled", "transformers, compiled"}
    check(rows)


@pytest.mark.slow
@pytest.mark.skipif(gpu_count() > 0, reason="there is a GPU")
def test_without_a_gpu_it_says_how_to_try_it() -> None:
    call = [sys.executable, SCRIPT, "--models", "gpt2-124m"]
    ended = subprocess.run(call, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    assert "torch finds no GPU on this machine; try the script with --device cpu --tiny" in ended.stderr

"""The mark `gpu`: without a GPU its tests are skipped out loud."""

import subprocess
import sys
from pathlib import Path

import pytest

from threefold.launch.device import gpu_count

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(gpu_count() > 0, reason="there is a GPU")
def test_the_summary_says_how_many_are_skipped_and_why() -> None:
    call = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu/test_nccl.py"]
    ended = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout
    assert "3 tests of the mark gpu were skipped: torch finds no GPU on this machine" in ended.stdout
    assert "3 skipped, 3 deselected" in ended.stdout

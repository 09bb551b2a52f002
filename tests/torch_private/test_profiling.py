"""The profiler prints nothing, as long as Kineto reads the variable that tells it so."""

import subprocess
import sys

import pytest

PROFILE = """
from torch.profiler import ProfilerActivity, profile
from threefold.torch_private.runtime import quieten_kineto
{}
with profile(activities=[ProfilerActivity.CPU]):
    pass
"""


@pytest.mark.slow
def test_kineto_prints_nothing() -> None:
    script = PROFILE.format("quieten_kineto()")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""

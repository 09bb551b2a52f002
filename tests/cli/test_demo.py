"""What `make demo` says to type next: the same run in another layout, and a text."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FEW_STEPS = "--set train.max_steps=2 --set train.eval_every=0"


@pytest.mark.slow
def test_the_commands_after_the_demo_work_when_pasted(tmp_path: Path) -> None:
    """In a copy of the files that it needs, whose environment is the one of the tests."""
    (tmp_path / "parity").mkdir()
    for name in ("Makefile", "pyproject.toml", "parity/pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (tmp_path / ".venv" / "ready").touch()
    options = {"cwd": tmp_path, "text": True, "capture_output": True, "timeout": 500}
    # Called by `make test-slow`, make would say at its end which folder it leaves.
    demo = subprocess.run(["make", "--no-print-directory", "demo", f"DEMO_OPTIONS={FEW_STEPS}"], **options)
    assert demo.returncode == 0, demo.stderr
    *_, hashed, _, layout, heading, command, activate = demo.stdout.splitlines()
    assert heading == "Next, in this folder:"
    assert command.strip().startswith(".venv/bin/threefold generate demo/run --prompt ")
    outside = {**options, "env": {"PATH": os.defpath, "HOME": str(tmp_path)}}
    pasted = subprocess.run(["bash", "-c", command.strip()], **outside)
    assert pasted.returncode == 0, pasted.stderr
    assert pasted.stdout.startswith("In Python, a list")
    assert (found := re.fullmatch("The hash of the weights: ([0-9a-f]{12})", hashed))
    pasted = subprocess.run(["bash", "-c", layout.strip()], **outside)
    assert pasted.returncode == 0, pasted.stderr
    assert re.search(rf"^weights +{found[1]} after step 2", pasted.stdout, re.MULTILINE)
    assert activate.split("#")[0].strip() == "source .venv/bin/activate"
    assert Path(sys.executable).with_name("activate").exists()


def test_the_readme_says_how_to_have_the_command() -> None:
    """`threefold` is not found after `make demo` alone: its examples stand below the ways to have it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    own = readme.index("## Your own run")
    assert 0 < readme.index("make demo") < readme.index("source .venv/bin/activate") < own
    assert 0 < readme.index("\npip install .") < own

"""The batch script of docs/resilience.md, with programs in the place of `srun` and `scontrol`."""

import os
import re
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "resilience.md"


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"),
    [(0, None, False), (137, None, True), (1, "4", True), (137, "5", False), (2, None, False), (130, "1", False)],
)
def test_a_job_is_started_again_after_a_kill(tmp_path: Path, status: int, restarts: str | None, requeued: bool) -> None:
    [script] = [block for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL) if "scontrol" in block]
    told = tmp_path / "told"
    for name, code in (("srun", status), ("scontrol", 0)):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {told}\nexit {code}\n')
        program.chmod(0o755)
    counted = {} if restarts is None else {"SLURM_RESTART_COUNT": restarts}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7000", **counted}
    ended = subprocess.run(["bash"], input=script, env=environment, text=True, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", "")
    started = "srun --kill-on-bad-exit=1 threefold train CONFIG --run-dir RUN --resume=auto"
    assert told.read_text().splitlines() == [started, *(["scontrol requeue 7000"] if requeued else [])]

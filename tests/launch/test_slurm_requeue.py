"""The batch script of docs/guides/several_machines.md, with programs in the place of Slurm's and of `threefold`."""

import os
import re
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/guides/several_machines.md"


@pytest.mark.parametrize(
    ("status", "state", "restarts", "requeued"),
    [
        (0, "finished", None, False),
        (0, "ended", None, True),
        (137, "ended", None, True),
        (1, "ended", "19", True),
        (137, "ended", "20", False),
        (2, "ended", None, False),
        (130, "ended", "1", False),
    ],
)
def test_a_job_is_started_again_after_a_kill_and_when_its_time_is_up(
    tmp_path: Path, status: int, state: str, restarts: str | None, requeued: bool
) -> None:
    [script] = [block for block in re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL) if "scontrol" in block]
    told = tmp_path / "told"
    told_of = f'#!/bin/sh\necho ${{0##*/}} "$@" >> {told}\n'
    reported = f"""#!/bin/sh\necho '{{"runs": [{{"folder": "runs/big", "state": "{state}", "steps": 6}}]}}'\n"""
    programs = {"srun": f"{told_of}exit {status}\n", "scontrol": told_of, "threefold": reported}
    for name, code in programs.items():
        (tmp_path / name).write_text(code)
        (tmp_path / name).chmod(0o755)
    counted = {} if restarts is None else {"SLURM_RESTART_COUNT": restarts}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7000", **counted}
    ended = subprocess.run(["bash"], input=script, env=environment, text=True, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", "")
    started = "srun --cpus-per-task=8 --kill-on-bad-exit=1 threefold train my.yaml --run-dir runs/big --resume=auto"
    assert told.read_text().splitlines() == [started, *(["scontrol requeue 7000"] if requeued else [])]

"""The same functions under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ready
from threefold.launch.output import log_file

HERE = Path(__file__).parent
RUN = """
import sys
from pathlib import Path
import workers
from threefold.launch import RankFailed, run
folder = Path({folder!r})
try:
    run(workers.{worker}, {args}, 2, run_dir=folder / "run")
except RankFailed as error:
    sys.exit(f"RankFailed: {{error}}")
"""


def torchrun(folder: Path, worker: str, args: str) -> subprocess.CompletedProcess[str]:
    script = folder / "running.py"
    script.write_text(RUN.format(folder=str(folder), worker=worker, args=args))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    return ready.run(command, env=environment)


@pytest.mark.slow
def test_ranks_meet_and_log(tmp_path: Path) -> None:
    ended = torchrun(tmp_path, "report_sum", "(folder,)")
    assert ended.returncode == 0
    assert ended.stdout == "hello from 0\nnative words of 0\n"
    for rank in range(2):
        assert (tmp_path / f"sum_{rank}").read_text() == "1"
        assert log_file(tmp_path / "run", rank).read_text() == f"hello from {rank}\nnative words of {rank}\n"


@pytest.mark.slow
def test_first_failure_is_told_once(tmp_path: Path) -> None:
    ended = torchrun(tmp_path, "fail", "(folder, 1, 'raise')")
    assert ended.returncode == 1
    log = log_file(tmp_path / "run", 1)
    told = [line for line in ended.stderr.splitlines() if line.startswith("RankFailed")]
    assert told == [f"RankFailed: rank 1 failed: ValueError: the cat sat on the keyboard (log: {log})"]
    assert "Traceback" in log.read_text()

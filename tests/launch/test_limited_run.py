"""Runs of which one rank has no more memory, or may open no more files: one sentence, or a restart."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.runs import check_checkpoints, record, restarts
from tests.launch.faulty_runs import DEADLINE, end, started, train_command, write_config
from tests.support.processes import assert_gone, pids_of
from tests.train.support import Run

SLOW, SWEEP = pytest.mark.slow, pytest.mark.sweep
SAID = {"memory": "allocate", "files": "Too many open files"}


@pytest.mark.sweep
@pytest.mark.parametrize(("what", "rank"), [("memory", 1), ("files", 1), ("files", 0)])
def test_a_limited_rank_is_one_sentence(small_run: Run, tmp_path: Path, what: str, rank: int) -> None:
    config = write_config(small_run.but(dp=2), tmp_path, "Limit", rank=rank, what=what, step=4)
    with started([train_command(config, tmp_path)]) as processes:
        line = end(processes, tmp_path, 2)
    assert line.startswith("Error: ")
    assert SAID[what] in line
    assert f"rank {rank}" in line
    if what == "memory" or rank:  # else what it began to write cannot be deleted without opening it
        check_checkpoints(tmp_path / "run")


@pytest.fixture(scope="module")
def undisturbed(small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """What the record of a run has where no rank is limited."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = write_config(small_run.but(dp=2), folder, "Limit", rank=-1, what="files")
    assert not restarts(output_of(config, folder))
    return record(folder / "run")


def output_of(config: Path, folder: Path) -> str:
    """What a run prints that ends well, and with no process left."""
    arguments = [sys.executable, *train_command(config, folder)]
    ended = subprocess.run(arguments, text=True, capture_output=True, timeout=DEADLINE)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    assert_gone(pids_of(folder / "run"))
    return ended.stdout


@pytest.mark.parametrize(
    ("what", "rank", "step"),
    [
        pytest.param("files", 1, 4, marks=SLOW),
        pytest.param("files", 0, 2, marks=SWEEP),
        pytest.param("memory", 1, 4, marks=SWEEP),
    ],
)
def test_a_limit_of_the_first_attempt_costs_no_step(
    undisturbed: list[dict[str, object]], small_run: Run, tmp_path: Path, what: str, rank: int, step: int
) -> None:
    config = write_config(small_run.but(dp=2), tmp_path, "Limit", restarts=1, rank=rank, what=what, step=step)
    (line,) = restarts(output_of(config, tmp_path))
    assert SAID[what] in line
    assert f"rank {rank}" in line
    assert record(tmp_path / "run") == undisturbed
    check_checkpoints(tmp_path / "run")

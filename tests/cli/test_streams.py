"""Commands whose output is closed or full: one sentence or none, and no run is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ready
from tests.support.sweep import sweep
from threefold.checkpoint.folder import complete

THREEFOLD = f"{sys.executable} -m threefold"
FULL = "Error: Standard output cannot be written (No space left on device).\n"


def shell(command: str, **options: bool) -> subprocess.CompletedProcess[bytes]:
    """Run a line of a shell that gives the status of the first program of a pipe."""
    script = f"set -o pipefail; {command}"
    return subprocess.run(["bash", "-c", script], capture_output=True, timeout=300, **options)


@pytest.mark.parametrize("command", ["config reference", "--help"])
@pytest.mark.parametrize(
    ("where", "status", "error"), [(">&-", 0, ""), (">/dev/full", 2, FULL), ("| true", 141, "")], ids=str
)
def test_a_command_that_prints(command: str, where: str, status: int, error: str) -> None:
    ended = shell(f"{THREEFOLD} {command} {where}")
    assert (ended.returncode, ended.stderr.decode()) == (status, error)


def test_what_is_printed_lands_in_no_file(tmp_path: Path) -> None:
    """The first file that is opened would get the number of a stream that is closed."""
    script = (
        "import sys; from threefold.terminal import guard_streams; guard_streams(); "
        f"file = open({str(tmp_path / 'file')!r}, 'w'); print('printed', flush=True); print('told', file=sys.stderr)"
    )
    ended = shell(f'{sys.executable} -c "{script}" <&- >&- 2>&-')
    assert ended.returncode == 0
    assert (tmp_path / "file").read_text() == ""


def test_an_error_that_cannot_be_told_keeps_its_status() -> None:
    for where in (">&- 2>&-", "2>/dev/full", "<&- >&- 2>&-"):
        assert shell(f"{THREEFOLD} config show missing.yaml {where}").returncode == 2


@sweep(
    "where",
    ["read by nobody", ">&-", "| true", ">/dev/full", "| head -1"],
    slow=(0, 1, 3),
)
def test_a_run_goes_on(config_file: Path, tmp_path: Path, where: str) -> None:
    run = tmp_path / "run"
    command = f"{THREEFOLD} train {config_file} --run-dir {run} --set train.max_steps=3"
    if where == "read by nobody":  # as with `| true`, in a process that has imported what a run needs
        with ready.ReadyProcess(command.split()) as process:
            assert process.stdout is not None
            process.stdout.close()
            process.stdout = None
            assert (process.communicate(timeout=300)[1], process.returncode) == ("", 0)
    else:
        ended = shell(f"{command} {where}")
        assert (ended.returncode, ended.stderr) == (0, b"")
    assert [checkpoint.step for checkpoint in complete(run)] == [2, 3]
    log = (run / "logs/rank_00000.log").read_text()
    assert "step 3/3  checkpoint: " in log
    assert "training loss" in log


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", ["| true", *(pytest.param(where, marks=pytest.mark.sweep) for where in (">&-", ">/dev/full"))]
)
def test_a_run_of_two_ranks_goes_on_and_resumes(config_file: Path, tmp_path: Path, where: str) -> None:
    run = tmp_path / "run"
    train = f"{THREEFOLD} train {config_file} --run-dir {run} --set parallel.dp=2 --console-ranks 0,1"
    assert shell(f"{train} --set train.max_steps=2 {where}").returncode == 0
    ended = shell(f"{train} --resume {where}")
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert [checkpoint.step for checkpoint in complete(run)] == [2, 4]


@pytest.mark.slow
def test_files_of_a_run_on_a_full_disk(config_file: Path, tmp_path: Path) -> None:
    """Each is named once; the steps are made and the checkpoints saved."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "tensorboard").write_text("a file where a folder should be")
    full = [run / name for name in ("metrics.jsonl", "train.log", "logs/rank_00000.log", "logs/rank_00001.log")]
    for path in (*full, run / "loss.png", run / "report.html"):
        path.symlink_to("/dev/full")
    ended = shell(f"{THREEFOLD} train {config_file} --run-dir {run} --set parallel.dp=2 --set log.every=1")
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert [checkpoint.step for checkpoint in complete(run)] == [2, 4]
    shown = ended.stdout.decode()
    assert "step 4/4  loss" in shown
    for path in full[:3]:
        assert shown.count(f"Warning: {path} cannot be written (No space left on device)") == 1
    assert shown.count(f"Warning: {run / 'tensorboard'} cannot be written (File exists)") == 1
    assert shown.count(f"Warning: {run / 'loss.png'} cannot be drawn (No space left on device).") == 1
    assert shown.count(f"Warning: {run / 'report.html'} cannot be written (No space left on device).") == 1
    assert "Traceback" not in shown


@pytest.mark.slow
def test_logs_that_cannot_be_made(config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "logs").write_text("a file where a folder should be")
    ended = shell(f"{THREEFOLD} train {config_file} --run-dir {run} --set train.max_steps=2")
    assert ended.returncode == 0
    assert f"Warning: {run}/logs/rank_00000.log cannot be written (" in (ended.stdout + ended.stderr).decode()
    assert [checkpoint.step for checkpoint in complete(run)] == [2]


@pytest.fixture(scope="module")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to generate from."""
    folder = tmp_path_factory.mktemp("trained")
    settings = {
        "data": {"path": str(tokens), "sequence_length": 16},
        "model": {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2},
        "train": {"max_steps": 1, "global_batch_size": 4, "eval_every": 0, "device": "cpu"},
    }
    (folder / "config.yaml").write_text(json.dumps(settings))
    command = [*THREEFOLD.split(), "train", folder / "config.yaml", "--run-dir", folder / "run"]
    ready.run(command).check_returncode()
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "where", "status", "error"),
    [(1, ">&-", 0, ""), (1, ">/dev/full", 2, FULL), (1, "| true", 141, ""), (2, ">/dev/full", 2, FULL)],
    ids=str,
)
def test_generating_for_nobody(trained: Path, tp: int, where: str, status: int, error: str) -> None:
    ended = shell(f"{THREEFOLD} generate {trained} --tp {tp} --prompt Document --max-new-tokens 40 {where}")
    assert (ended.returncode, ended.stderr.decode()) == (status, error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (r"printf 'caf\xe9' | {} ", "Standard input is not UTF-8 text (byte 3 is 0xe9); convert it first"),
        (r"""{} --prompt "$(printf 'caf\xe9')" """, "--prompt is not UTF-8 text: its character 4 is the byte 0xe9;"),
        (r"{} <&-", "--prompt is empty"),
    ],
    ids=["standard input", "argument", "closed"],
)
def test_prompts_that_are_no_text(trained: Path, prompt: str, sentence: str) -> None:
    ended = shell(prompt.format(f"{THREEFOLD} generate {trained}"))
    assert ended.returncode == 2
    assert ended.stderr.decode().startswith(f"Error: {sentence}")
    assert len(ended.stderr.splitlines()) == 1

"""`threefold train` from end to end, on a tiny model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ready
from threefold.config import load_config
from threefold.launch.checks import resolve_run
from threefold.launch.output import log_file

THREEFOLD = [sys.executable, "-m", "threefold"]
ENDLESS = ("--set", "train.max_steps=1000000", "--set", "log.every=1", "--set", "train.eval_every=0")


def train(
    config_file: Path, run: Path, *options: str, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    given = ["train", str(config_file), "--run-dir", str(run), *options]
    if not launcher:
        return ready.run([*THREEFOLD, *given])
    command = [sys.executable, "-m", *launcher, "-m", "threefold", *given]
    return subprocess.run(command, text=True, capture_output=True, timeout=200)


def started(config_file: Path, run: Path, *options: str) -> subprocess.Popen[str]:
    """An endless run that has made its first step, in a session of its own as in a terminal."""
    command = [*THREEFOLD, "train", str(config_file), "--run-dir", str(run), *ENDLESS, *options]
    process = ready.ReadyProcess(command, new_session=True)
    assert process.stdout is not None
    assert any(" 1/" in line for line in process.stdout)
    return process


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


def test_run_and_resume_in_another_layout(config_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = train(config_file, run, "--set", "parallel.pp=2")
    assert (ended.returncode, ended.stderr) == (0, "")
    stored = resolve_run(load_config(run / "config.yaml"))
    opening = ended.stdout.splitlines()
    assert opening[0] == "Starting 2 ranks …"
    assert opening[1].startswith("Training ")
    data = stored.data.path
    assert opening[1].endswith(
        f" parameters (gpt, 2 layers of width 32) in fp32 on cpu, dp 1 · tp 1 · pp 2: {data} → {run}"
    )
    assert opening[2].startswith("4 steps of 4 samples of 16 tokens read the ")
    assert opening[3].startswith("step 1/4  loss ")
    assert opening[-1].startswith("checkpoint ")
    assert (stored.parallel.pp, stored.train.device) == (2, "cpu")
    assert [path.name for path in sorted((run / "logs").iterdir())] == ["rank_00000.log", "rank_00001.log"]
    assert log_file(run, 0).read_text().strip() in ended.stdout
    assert len(losses(run)) == 4

    again = train(config_file, run)
    assert again.returncode == 2
    assert again.stderr == f"Error: {run} already has checkpoints; resume with --resume, or choose another --run-dir.\n"
    assert resolve_run(load_config(run / "config.yaml")) == stored

    changes = ("--set", "train.max_steps=6", "--set", "parallel.pp=1", "--set", "parallel.dp=4")
    resumed = train(run / "config.yaml", run, "--resume", *changes)
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert len(losses(run)) == 6


@pytest.mark.slow
def test_the_first_line_does_not_wait_for_torch(config_file: Path, tmp_path: Path) -> None:
    """Printed once the config, the data and the folder are checked: a wrong one has its sentence alone."""
    script = (
        "import sys\n"
        "from threefold.cli import main, train\n"
        "train._say = lambda line: sys.exit(line + ' torch' * ('torch' in sys.modules))\n"
        "main()\n"
    )
    config = config_file.read_text().replace("device: cpu", "device: cpu, micro_batch_size: 4")
    for text, options, printed in (
        (config_file.read_text(), ("parallel.dp=2",), "Starting 2 ranks …\n"),
        (config, ("train.max_steps=2",), "Starting 1 process …\n"),
        (
            config,
            ("parallel.tp=3",),
            "Error: --set parallel.tp=3: parallel.tp is 3 but must divide model.num_attention_heads 4; use ",
        ),
        (config, ("data.path=nowhere",), "Error: data.path is nowhere, which does not exist"),
    ):
        config_file.write_text(text)
        command = [
            "train",
            str(config_file),
            "--run-dir",
            str(tmp_path / "run"),
            *(f"--set={each}" for each in options),
        ]
        ended = subprocess.run([sys.executable, "-c", script, *command], text=True, capture_output=True, cwd=tmp_path)
        assert (ended.stdout, ended.stderr[: len(printed)]) == ("", printed)


@pytest.mark.slow
def test_same_losses_from_the_command_from_torchrun_and_from_python(config_file: Path, tmp_path: Path) -> None:
    options = ("--set", "parallel.dp=2", "--set", "train.eval_every=0")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert train(config_file, tmp_path / "command", *options).returncode == 0
    assert train(config_file, tmp_path / "torchrun", *options, launcher=torchrun).returncode == 0
    script = (
        "from pathlib import Path\n"
        "from threefold.config import load_config\n"
        "from threefold.launch.training_run import prepare_training\n"
        f"config = load_config(Path({str(config_file)!r}), {list(options[1::2])!r})\n"
        f"prepare_training(config, Path({str(tmp_path / 'python')!r})).start()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)
    curves = [losses(tmp_path / way) for way in ("command", "torchrun", "python")]
    assert len(curves[0]) == 4
    assert curves[0] == curves[1] == curves[2]


@pytest.mark.slow
def test_interrupt_is_quiet(config_file: Path, tmp_path: Path) -> None:
    process = started(config_file, tmp_path / "run", "--set", "parallel.tp=2")
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (130, "")

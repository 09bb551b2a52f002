"""`threefold sweep`: its runs and their names, what it repeats, and the page in the end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.ready import run as threefold
from tests.train.support import write_tokens
from threefold.errors import UserError
from threefold.report.metrics import read_metrics
from threefold.report.sweep import Sweep, Swept

CONFIG = """
model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2}
data: {path: tokens, sequence_length: 16}
parallel: {dp: 1, tp: 1, pp: 1}
train: {max_steps: 4, global_batch_size: 4, eval_every: 2, eval_batches: 1}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_tokens(tmp_path / "tokens", [f"The {word} of a sweep has words and more words. " * 9 for word in "abcdefgh"])
    (tmp_path / "my.yaml").write_text(CONFIG)
    return tmp_path / "my.yaml"


def test_every_combination_has_a_name_that_says_what_it_is() -> None:
    swept = Swept.parse(["optimizer.lr=1e-3,3e-3", "train.max_steps=20", "model.num_layers=4,8"])
    runs = swept.runs()
    assert [run.name for run in runs] == [
        "lr=1e-3,num_layers=4",
        "lr=1e-3,num_layers=8",
        "lr=3e-3,num_layers=4",
        "lr=3e-3,num_layers=8",
    ]
    assert runs[1].overrides == ("train.max_steps=20", "optimizer.lr=1e-3", "model.num_layers=8")


def test_values_with_commas_and_slashes_and_equal_last_parts() -> None:
    swept = Swept.parse(["optimizer.betas=[0.9, 0.99],[0.9, 0.95]", 'data.split="8,2","9,1"'])
    assert list(swept.values.values()) == [("[0.9, 0.99]", "[0.9, 0.95]"), ('"8,2"', '"9,1"')]
    assert swept.runs()[0].name == "betas=0.9-0.99,split=8-2"
    paths = Swept.parse(["data.path=a/tokens,b/tokens", "model.path=x,y"])  # not a setting, but the same last part
    assert paths.runs()[0].name == "data.path=a-tokens,model.path=x"
    alike = Swept.parse(["data.path=a/b,a-b"])
    assert [run.name for run in alike.runs()] == ["path=a-b", "path=a-b,2"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["optimizer.lr=1e-3"], "A sweep needs a setting with several values, such as --set optimizer.lr=1e-3,3e-3."),
        (["optimizer.lr=1e-3,"], "--set optimizer.lr=1e-3, must be SECTION.KEY=VALUE,VALUE…"),
        (["optimizer.lr=1,1"], "--set optimizer.lr=1,1 has a value twice; leave one of them out."),
        (["a.b=1,2", "a.b=3"], "--set has a.b twice; give all its values at once, between commas."),
        (
            ["a.b=1,2,3,4,5,6,7,8,9,10", "a.c=1,2,3,4,5,6,7,8,9,10", "a.d=1,2,3,4,5,6,7,8,9,10,11"],
            "These values make 1,100",
        ),
    ],
)
def test_wrong_settings_are_one_sentence(settings: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        Swept.parse(settings)


def test_another_folder_is_not_taken(config: Path) -> None:
    (config.parent / "mine").mkdir()
    (config.parent / "mine" / "notes.txt").write_text("keep")
    sweep = Sweep(config, config.parent / "mine", Swept.parse(["optimizer.lr=1,2"]).runs())
    with pytest.raises(UserError, match=r"has notes\.txt but no sweep\.json, so it is not of a sweep; use another"):
        sweep.begin()


@pytest.mark.slow
def test_a_sweep_repeats_what_failed_alone_and_compares_the_runs(config: Path) -> None:
    """One value of three diverges; the sweep goes on, says so, and started again makes that run alone."""
    folder = config.parent / "runs" / "my-sweep"
    settings = ("--set", "optimizer.lr=1e-3,1e30,3e-3", "--set", "train.seed=1")
    command = (sys.executable, "-m", "threefold", "sweep", "my.yaml", *settings)
    first = threefold(command, cwd=config.parent)
    assert first.returncode == 1, first.stdout + first.stderr
    assert "2/3  lr=1e30 failed after" in first.stdout
    assert re.search(
        r"^lr=1e30 failed: Training diverged .*; see runs/my-sweep/logs/lr=1e30.log\.$", first.stdout, re.M
    )
    assert {each.name for each in folder.iterdir()} == {
        *("lr=1e-3", "lr=1e30", "lr=3e-3"),
        *("logs", "report.html", "sweep.json"),
    }
    lines = {name: list(read_metrics(folder / name / "metrics.jsonl")) for name in ("lr=1e-3", "lr=3e-3")}
    losses = {name: [line["loss"] for line in each if "loss" in line] for name, each in lines.items()}
    assert all(len(each) == 4 for each in losses.values())
    assert losses["lr=1e-3"][0] == losses["lr=3e-3"][0]
    assert losses["lr=1e-3"][-1] != losses["lr=3e-3"][-1]
    states = {run["name"]: run["state"] for run in json.loads((folder / "sweep.json").read_text())["runs"]}
    assert states == {"lr=1e-3": "finished", "lr=1e30": "failed", "lr=3e-3": "finished"}
    found = re.search(r'<script[^>]*id="report"[^>]*>(.*?)</script>', (folder / "report.html").read_text(), re.S)
    assert found is not None
    outcomes = json.loads(found[1])["outcomes"]
    assert outcomes["columns"] == ["run", "optimizer.lr", "state", "loss", "validation", "best"]
    assert [row[0] for row in outcomes["rows"]][-1] == "lr=1e30"
    best = [row[-1] for row in outcomes["rows"]][:2]
    assert best == sorted(best)
    assert outcomes["rows"][0][3] == pytest.approx(losses[outcomes["rows"][0][0]][-1], rel=1e-5)
    before = {each: (folder / each / "metrics.jsonl").stat().st_mtime_ns for each in losses}
    again = threefold(command, cwd=config.parent)
    assert "2 of 3 runs are finished already." in again.stdout
    assert "1/3" not in again.stdout
    assert before == {each: (folder / each / "metrics.jsonl").stat().st_mtime_ns for each in losses}


@pytest.mark.slow
def test_a_stopped_sweep_continues(config: Path) -> None:
    """Ctrl-C ends the run with a checkpoint; the same command goes on from there, and makes the rest."""
    config.write_text(CONFIG.replace("max_steps: 4", "max_steps: 200") + "checkpoint: {every: 0}\n")
    folder = config.parent / "there"
    settings = [
        "--set",
        "optimizer.lr=1e-3,3e-3",
        "--set",
        "train.eval_every=0",
        "--sweep-dir",
        str(folder),
        "--jobs",
        "2",
    ]
    command = [sys.executable, "-m", "threefold", "sweep", "my.yaml", *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=config.parent, stdout=subprocess.PIPE, text=True, env=environment) as process:
        files = [folder / name / "metrics.jsonl" for name in ("lr=1e-3", "lr=3e-3")]
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not all(map(_has_begun, files)):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=120)
    assert process.returncode == 130, told
    assert "Stopped; the same command continues the sweep." in told
    steps = [max(line["step"] for line in read_metrics(each)) for each in files]
    assert all(2 < each < 200 for each in steps)
    done = subprocess.run(command, cwd=config.parent, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for each, step in zip(files, steps, strict=True):
        assert [line["step"] for line in read_metrics(each)] == list(range(1, 201))
        log = (folder / "logs" / f"{each.parent.name}.log").read_text()
        assert f"step_{step:08}" in log
        assert "Resuming from" in log


def _has_begun(metrics: Path) -> bool:
    return metrics.exists() and metrics.read_bytes().count(b"\n") > 2

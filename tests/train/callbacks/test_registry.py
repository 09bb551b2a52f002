"""Callbacks of another package: one file and one entry point, named in `train.callbacks`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.plugin_package import write_package
from tests.train.support import Run
from threefold.errors import UserError
from threefold.report.metrics import read_metrics
from threefold.train.callbacks.registry import CALLBACKS, check_names

GROUP = "threefold.callbacks"
MODULE = '''
import json
from threefold.train.callbacks.base import Callback


class Diary(Callback):
    """Writes what it is called with, one file for each rank that has it."""

    @classmethod
    def for_run(cls, run):
        return cls(run.run_dir / f"{cls.__name__}-{run.mesh.rank}.jsonl", run.config.train.max_steps)

    def __init__(self, path, steps):
        self.path, self.steps = path, steps

    def write(self, *what):
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\\n")

    def before_fit(self, start):
        self.write("before_fit", start, self.steps)

    def before_step(self, step, batch):
        self.write("before_step", step, batch.tokens.tolist())

    def after_step(self, record):
        self.write("after_step", record.step, record.loss)

    def after_evaluation(self, record):
        self.write("after_evaluation", record.step, record.loss)

    def after_checkpoint(self, step, path):
        self.write("after_checkpoint", step, str(path), path.is_dir())

    def after_fit(self):
        self.write("after_fit")

    def close(self):
        self.write("close")


class EveryRank(Diary):
    ranks = "all"


class Unwanted(Diary):
    @classmethod
    def for_run(cls, run):
        return None


class Foreign:
    pass
'''
ENTRIES = {name.lower(): f"toy_package:{name}" for name in ("Diary", "EveryRank", "Unwanted", "Foreign")}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write_package(tmp_path / "site", GROUP, ENTRIES, MODULE)


def train(run: Run, folder: Path, package: Path) -> subprocess.CompletedProcess[str]:
    """`threefold train` with the package installed."""
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(run.config.sections()))
    search = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "threefold", "train", str(config), "--run-dir", str(folder / "run")],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
    )


def told(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_callback_of_another_package_sees_the_run(small_run: Run, tmp_path: Path, package: Path) -> None:
    """Once for the run, or once per rank where `ranks` says so."""
    more: tuple[tuple[str, Any], ...] = (
        ("train.callbacks", ["diary", "everyrank", "unwanted"]),
        ("train.eval_every", 2),
        ("train.eval_batches", 1),
        ("checkpoint.every", 2),
    )
    ended = train(small_run.but(dp=2, tp=2, pp=2, steps=3, set=more), tmp_path, package)
    assert ended.returncode == 0, ended.stderr
    run = tmp_path / "run"
    names = ["Diary-0.jsonl", *(f"EveryRank-{rank}.jsonl" for rank in range(8))]
    assert sorted(path.name for path in run.glob("*-*.jsonl")) == names
    lines = list(read_metrics(run / "metrics.jsonl"))
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    evaluations = {line["step"]: line["valid_loss"] for line in lines if "valid_loss" in line}
    saved = {step: [step, str(run / "checkpoints" / f"step_{step:08d}"), True] for step in (2, 3)}
    expected = [
        ["before_fit", 0, 3],
        *(["after_step", step, losses[step]] for step in (1, 2)),
        ["after_evaluation", 2, evaluations[2]],
        ["after_checkpoint", *saved[2]],
        ["after_step", 3, losses[3]],
        ["after_evaluation", 3, evaluations[3]],
        ["after_checkpoint", *saved[3]],
        ["after_fit"],
        ["close"],
    ]
    read: dict[str, list[list[Any]]] = {}
    for name in names:
        calls = told(run / name)
        assert [call for call in calls if call[0] != "before_step"] == expected, name
        read[name] = [call for call in calls if call[0] == "before_step"]
        assert [call[1] for call in read[name]] == [1, 2, 3]
    # ranks are dp-major: 0 to 3 are one replica
    assert read[names[1]] == read[names[4]] != read[names[5]] == read[names[8]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("dairy", r"train\.callbacks has 'dairy' but each must be one of .*; the nearest is diary"),
        (
            "foreign",
            r"train\.callbacks has foreign, .*toy_package\.Foreign.* but must be a subclass of .*base\.Callback",
        ),
    ],
)
def test_what_is_no_callback(small_run: Run, tmp_path: Path, package: Path, name: str, sentence: str) -> None:
    ended = train(small_run.but(steps=1, set=(("train.callbacks", [name]),)), tmp_path, package)
    assert ended.returncode == 2
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("Error")]
    assert re.search(sentence, error), error


def test_names_are_checked_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(write_package(tmp_path, GROUP, ENTRIES, "raise RuntimeError('imported')")))
    check_names(["diary", "metrics"])
    with pytest.raises(UserError, match="the nearest is summary"):
        check_names(["sumary"])
    assert {"metrics", "step_log", "diary"} <= set(CALLBACKS.names())

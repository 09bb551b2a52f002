"""The scripts in examples/ run as commands, and give the same on one process and on several."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from threefold.verify.worker_pool import WorkerPool

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def losses(*command: str) -> list[float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", ended.stdout)]


@pytest.mark.slow
def test_a_model_of_transformers_has_one_loss_in_every_layout() -> None:
    pytest.importorskip("transformers")
    script = str(EXAMPLES / "transformers_model.py")
    alone = losses(sys.executable, script)
    assert len(alone) == 3
    assert alone[2] < alone[0]
    assert losses(*LAUNCH, "4", script, "--tp", "2", "--zero", "1") == pytest.approx(alone, rel=2e-3)


@pytest.mark.slow
def test_a_script_of_accelerate_has_one_loss_on_every_number_of_processes(tmp_path: Path) -> None:
    import torch

    script = str(EXAMPLES / "accelerate_script.py")
    alone = losses(sys.executable, script)
    assert len(alone) == 3
    launched = losses(*LAUNCH, "3", script, "--save", str(tmp_path / "weights.pt"))
    assert launched == pytest.approx(alone, rel=2e-3)
    assert torch.load(tmp_path / "weights.pt", weights_only=True)["0.weight"].shape == (32, 8)


@pytest.fixture(scope="module")
def ways() -> dict[str, Any]:
    """The names in the script of the comparison."""
    return runpy.run_path(str(EXAMPLES / "compare_ways.py"), run_name="imported")


def test_f1_and_area_under_the_curve_of_known_cases(ways: dict[str, Any]) -> None:
    f1, area = ways["f1_score"], ways["area_under_curve"]
    # scikit-learn's documentation of roc_auc_score: 0.75 for this case.
    assert area([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]) == 0.75
    assert area([0, 1, 0, 1], [0.5, 0.5, 0.5, 0.5]) == 0.5
    assert area([1, 1, 0], [3.0, 2.0, 1.0]) == 1.0
    assert area([0, 1, 1], [2.0, 2.0, 3.0]) == 0.75
    assert f1([1, 1, 1, 0, 0], [1, 1, 0, 1, 0]) == pytest.approx(2 / 3)
    assert f1([0, 0], [0, 0]) == 0.0


def test_the_generated_comments_are_read_back(ways: dict[str, Any], tmp_path: Path) -> None:
    ways["write_comments"](tmp_path / "comments.csv", 200)
    assert (tmp_path / "comments.csv").read_text().startswith("comment_text,label\n")
    texts, labels = ways["read_comments"](tmp_path / "comments.csv")
    assert len(texts) == len(labels) == 200
    assert {len(text) for text in texts} == {ways["LENGTH"]}
    assert 60 < sum(labels) < 140


METRICS = ("accuracy", "f1", "auc")


def trained(name: str, comments: Path) -> dict[str, float]:
    """What a way of the script reaches, on a rank of the pool."""
    script = runpy.run_path(str(EXAMPLES / "compare_ways.py"), run_name="imported")
    (way,) = [way for way in script["WAYS"] if way.name == name]
    return dict(script["train"](way, comments, 4))


@pytest.mark.sweep
def test_ways_reach_one_accuracy(pool: WorkerPool, ways: dict[str, Any], tmp_path: Path) -> None:
    """They start from the same weights and read the same batches."""
    ways["write_comments"](tmp_path / "comments.csv", 4000)
    # The pool starts all ranks in one way; the next test starts them as the script does.
    of_pool = [way for way in ways["WAYS"] if way.by != "accelerate" and way.start != "spawn"]
    found = {way.name: pool.run(way.ranks, trained, way.name, tmp_path / "comments.csv")[0] for way in of_pool}
    assert {"torchrun", "bf16", "tensor parallel", "pipeline"} < set(found)
    assert {row["rows"] for row in found.values()} == {800}
    alone = found["one process"]
    assert alone["accuracy"] > 0.9
    for name, row in found.items():
        rounded = name in ("bf16", "compressed, fp16")
        for metric in METRICS:
            assert row[metric] == pytest.approx(alone[metric], abs=0.03 if rounded else 0.01), (name, metric)


TEN_WAYS = [
    "one process",
    "spawn",
    "torchrun",
    "bf16",
    "compressed, fp16",
    "accumulation",
    "ZeRO 1",
    "tensor parallel",
    "pipeline",
    "accelerate",
]


def printed_ways(text: str) -> dict[str, list[str]]:
    """The rows of the printed table: of each way its ranks, training time, whole time, speed-up and metrics."""
    rows = {}
    for line in text.splitlines():
        for name in TEN_WAYS:
            if line.strip().startswith(f"{name}  "):
                rows[name] = line.strip().removeprefix(name).replace(" s ", " ").split()
    return rows


def test_the_speed_up_is_the_ratio_of_the_training_times(ways: dict[str, Any], capsys: pytest.CaptureFixture) -> None:
    def measured(name: str, seconds: float) -> dict[str, object]:
        return {
            "name": name,
            "ranks": 2,
            "seconds": seconds,
            "whole_seconds": 9.9,
            "accuracy": 0.5,
            "f1": 0.5,
            "auc": 1,
        }

    ways["print_table"]([measured("one process", 8.0), measured("spawn", 5.0), measured("pipeline", 16.0)])
    rows = printed_ways(capsys.readouterr().out)
    assert {name: row[1:4] for name, row in rows.items()} == {
        "one process": ["8.0", "9.9", "1.00"],
        "spawn": ["5.0", "9.9", "1.60"],
        "pipeline": ["16.0", "9.9", "0.50"],
    }


@pytest.mark.sweep
def test_the_command_that_compares_ways(ways: dict[str, Any], tmp_path: Path) -> None:
    """All ten ways, each a command of its own, that of Accelerate too."""
    assert [way.name for way in ways["WAYS"]] == TEN_WAYS
    command = [sys.executable, str(EXAMPLES / "compare_ways.py"), "--folder", str(tmp_path)]
    command += ["--rows", "1000", "--epochs", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stderr
    found = {row["name"]: row for row in json.loads((tmp_path / "ways.json").read_text())}
    assert list(found) == TEN_WAYS
    assert {row["rows"] for row in found.values()} == {200}
    for name, row in found.items():
        for metric in METRICS:
            assert row[metric] == pytest.approx(found["one process"][metric], abs=0.02), (name, metric)
    assert (tmp_path / "ways.png").stat().st_size > 10_000
    printed = printed_ways(ended.stdout)
    assert list(printed) == TEN_WAYS
    first = found["one process"]["seconds"]
    for name, row in found.items():
        assert printed[name][1] == f"{row['seconds']:.1f}"
        assert printed[name][3] == f"{first / row['seconds']:.2f}", name

"""A schedule written in Python outside the package: one file, trained, verified, simulated, planned and dry-run."""

from pathlib import Path
from typing import Any

import pytest

from tests.planner.python_schedules import TOY
from tests.support.parity import Case, check
from tests.verify.support import task, verify
from threefold.comm.layout import parse


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(TOY)
    return "toy.py:looped"


def case_of(folder: Path) -> Case:
    name = f"{folder / 'toy.py'}:looped"
    return Case(dtype="fp64", layers=7, dropout=0.1, dp=2, pp=2, schedule=name, accumulation=4)


def test_it_trains_what_one_process_trains(pool, expected, toy: str, tmp_path: Path) -> None:
    case = case_of(tmp_path)
    check(pool, expected, case)


@pytest.mark.slow
def test_verify_finds_it_equal(pool, toy: str, tmp_path: Path) -> None:
    layout = f"dp2·pp2 schedule={tmp_path / 'toy.py'}:looped"
    (result,) = verify(pool, task(layout), tmp_path, layout)
    assert result.verdict == "equal", result.message
    assert str(parse(str(result.spec))) == layout


COMMANDS = {
    "simulate": ("simulate", "--schedule", "toy.py:looped", "--stages", "2", "--microbatches", "4"),
    "dry-run": ("dry-run", "run.yaml"),
    "estimate": ("estimate", "run.yaml", "--hardware", "h100"),
    "plan": ("plan", "run.yaml", "--hardware", "h100", "--gpus", "2", "--fix", "parallel.schedule=toy.py:looped"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_take_it(threefold: Any, toy: str, tmp_path: Path, command: str) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: {num_layers: 4, hidden_size: 16, num_attention_heads: 2, vocab_size: 64}\n"
        "data: {path: unused, sequence_length: 16}\n"
        "train: {max_steps: 2, global_batch_size: 4, micro_batch_size: 1}\n"
        "parallel: {pp: 2, schedule: toy.py:looped}\n"
    )
    status, printed, error = threefold(*COMMANDS[command])
    assert (status, error) == (0, "")
    assert command not in ("simulate", "plan") or "looped" in printed

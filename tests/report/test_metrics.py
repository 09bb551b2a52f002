"""A metrics file that was damaged, and one that cannot be written."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.train.support import record
from threefold.report.metrics import MetricsFile, read_metrics, read_metrics_file
from threefold.train.callbacks.step_log import LineFile


def line(step: int, **values: Any) -> bytes:
    return json.dumps({"step": step, "loss": step / 10, "tokens": 8, **values}).encode() + b"\n"


def evaluation(step: int) -> bytes:
    return json.dumps({"step": step, "valid_loss": step / 5, "valid_tokens": 8}).encode() + b"\n"


def shown(path: Path) -> list[tuple[int, str]]:
    return [(found["step"], "loss" if "loss" in found else "valid") for found in read_metrics(path)]


DAMAGE = {
    "nul": b"\0" * 100 + b"\n",
    "garbage": bytes(range(128, 256)) + b"\n",
    "no object": b"[1, 2]\n",
    "a number": b"7\n",
    "another object": b'{"steps": 3}\n',
    "a step that is text": b'{"step": "3", "loss": 1.0, "tokens": 8}\n',
    "a loss that is text": b'{"step": 3, "loss": "x", "tokens": 8}\n',
    "cut": b'{"step": 3, "lo\n',
    "deep": b"[" * 100_000 + b"\n",
    "a long number": b'{"step": ' + b"9" * 10_000 + b"}\n",
}


def lacking(path: Path, steps: str, start: int) -> str:
    return (
        f"Warning: {path} has no line of {steps}, though the run resumes after step {start}: the file was cut, or "
        "these were made in another folder; training goes on, and curve and report are without them."
    )


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_every_good_line_around_a_damaged_one_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2) + evaluation(2) + damage + line(4) + line(5))
    callback = MetricsFile(path)
    callback.before_fit(4)
    callback.close()
    assert shown(path) == [(1, "loss"), (2, "loss"), (2, "valid"), (4, "loss")]
    assert capsys.readouterr().out.splitlines() == [
        f"Warning: {path} has line 4 damaged; the other lines are kept.",
        lacking(path, "step 3", 4),
    ]
    assert len(path.read_bytes().splitlines()) == 4


def test_one_warning_for_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x\n" * 7 + line(3) + line(1) + line(2) + line(2, loss=9.0))
    callback = MetricsFile(path)
    callback.before_fit(3)
    callback.close()
    assert [(found["step"], found["loss"]) for found in read_metrics(path)] == [(1, 0.1), (2, 9.0), (3, 0.3)]
    (warning,) = capsys.readouterr().out.splitlines()
    assert "has lines 1, 2, 3, 4, 5 and 2 more damaged and line 10 repeated by a later line of the same" in warning


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b"\0\0\0", line(3)[:-1]], ids=["cut", "nul", "no end"])
def test_a_torn_last_line_is_repaired(tmp_path: Path, capsys: pytest.CaptureFixture[str], torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2) + torn)
    callback = MetricsFile(path)
    callback.before_fit(3)
    callback.after_step(record(4))
    callback.close()
    kept = [1, 2, 3, 4] if torn.endswith(b"}") else [1, 2, 4]
    assert (read_metrics_file(path).damaged, [found["step"] for found in read_metrics(path)]) == ((), kept)
    assert capsys.readouterr().out == ("" if 3 in kept else lacking(path, "step 3", 3) + "\n")


@pytest.mark.parametrize(
    ("kept", "steps"),
    [
        (range(1, 14), None),
        ((*range(1, 5), 10, 11, 12, 13), "steps 5 to 9"),
        (range(1, 6), "steps 6 to 12"),
        (range(9, 13), "steps 1 to 8"),
        ((), "steps 1 to 12"),
        (range(1, 13, 2), "steps 2, 4, 6, 8, 10 and 1 more"),
    ],
)
def test_steps_that_a_cut_file_lacks_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: Sequence[int], steps: str | None
) -> None:
    path = tmp_path / "metrics.jsonl"
    if kept:
        path.write_bytes(b"".join(line(step) for step in kept))
    callback = MetricsFile(path)
    callback.before_fit(12)
    callback.close()
    assert capsys.readouterr().out.splitlines() == ([] if steps is None else [lacking(path, steps, 12)])
    assert [found["step"] for found in read_metrics(path)] == [step for step in kept if step <= 12]


def test_a_whole_line_after_half_of_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + b'{"step": 2, "lo' + line(3) + b"\0\0" + line(4))
    found = read_metrics_file(path)
    assert ([kept["step"] for kept in found.lines], found.damaged) == ([1, 3, 4], (2, 3))


KILLED = """
import os, signal, sys
from pathlib import Path
from threefold.report.metrics import MetricsFile
def watch(name, arguments):
    if name == {event!r} and str(arguments[0]).startswith({path!r}) and seen.append(name) is None and {when}:
        os.kill(os.getpid(), signal.SIGKILL)
seen = []
sys.addaudithook(watch)
MetricsFile(Path({path!r})).before_fit(2)
"""


@pytest.mark.parametrize(("event", "when"), [("open", "len(seen) == 2"), ("os.rename", "True")])
def test_a_kill_while_it_is_rewritten_loses_nothing(tmp_path: Path, event: str, when: str) -> None:
    path = tmp_path / "metrics.jsonl"
    before = line(1) + b"damaged\n" + line(2) + line(3)
    path.write_bytes(before)
    script = KILLED.format(event=event, path=str(path), when=when)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert path.read_bytes() == before
    callback = MetricsFile(path)
    callback.before_fit(2)
    callback.close()
    assert shown(path) == [(1, "loss"), (2, "loss")]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_lines_wait_for_a_full_disk_and_are_told_of_once(tmp_path: Path) -> None:
    """A file that may not grow, as on a full disk: a line cut short is taken back, and written when there is room."""
    path = tmp_path / "lines"
    script = (
        "import resource, sys; from pathlib import Path; from threefold.train.callbacks.step_log import LineFile\n"
        f"file = LineFile(Path({str(path)!r}))\n"
        "file.open(append=False)\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "file.write('a' * 10)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (15, hard))\n"
        "file.write('b' * 10); file.write('c' * 10)\n"
        "print(open(file.path).read().split())\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
        "file.write('d' * 10)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    warning = f"Warning: {path} cannot be written (File too large); training continues without it."
    assert ended.stdout.splitlines() == [warning, "['aaaaaaaaaa']"]
    assert path.read_text().split() == [letter * 10 for letter in "abcd"]


@pytest.mark.parametrize("kind", ["full", "folder", "fifo", "no folder"])
def test_what_is_no_file_of_ours_is_told_of_once(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines"
    if kind == "full":
        path.symlink_to("/dev/full")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path = tmp_path / "missing" / "lines"
    file = LineFile(path)
    file.open(append=False)
    for _ in range(3):
        file.write("text")
    file.close()
    (warning,) = capsys.readouterr().out.splitlines()
    assert warning.startswith(f"Warning: {path} cannot be written (")

"""Outcome of a command that a test ran, many command lines in one process, and a display that shows nothing."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Ended(NamedTuple):
    status: int
    output: str
    error: str

    @property
    def refusal(self) -> str:
        """The one sentence of a command that is refused and prints nothing else."""
        assert (self.status, self.output, self.error.count("\n")) == (2, "", 1), self
        assert self.error.startswith("Error: "), self
        return self.error


Command = Callable[..., Ended]


class Silent:
    """Progress that is noted and not shown: name, bytes and bytes so far of each phase."""

    def __init__(self) -> None:
        self.phases: list[list[Any]] = []

    def phase(self, name: str, total_bytes: int) -> None:
        self.phases.append([name, total_bytes, 0])

    def advance(self, read_bytes: int) -> None:
        self.phases[-1][2] += read_bytes


_IN_TURN = """\
import contextlib, io, json, sys
from threefold.cli import main

for arguments in json.load(sys.stdin):
    sys.argv = ["threefold", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code
    slow = sorted({"torch", "transformers", "matplotlib", "rich"} & set(sys.modules))
    print(json.dumps([status, out.getvalue(), error.getvalue(), slow]))
"""


def ends_in_one_process(lines: Sequence[Sequence[str]], folder: Path) -> list[tuple[int, str, str, list[str]]]:
    """Run command lines one after another in a process, which thus has imported what any of them has.

    Returns:
        for each, its exit status, its output, its errors, and which slow modules are imported by then.
    """
    command, given = [sys.executable, "-c", _IN_TURN], json.dumps(lines)
    ran = subprocess.run(command, input=given, cwd=folder, capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    ends = [tuple(json.loads(end)) for end in ran.stdout.splitlines()]
    assert len(ends) == len(lines)
    return ends

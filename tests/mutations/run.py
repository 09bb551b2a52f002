"""Makes the mistakes of the catalogue one at a time, in a copy of the repository, and sees that each is found.

    python -m tests.mutations.run [--only NAME]... [--jobs N] [--test-only | --verify-only]

First the copy is shown to be right: every named test passes in it, and every `threefold verify` command finds all
layouts equal. Then the mistakes: for each the named test has to fail, by what it asserts or by an error of the run, and
`threefold verify` to find a departure. The exit status is 1 where a test does not see its mistake.
"""

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.mutations.catalogue import ROOT, Mistake, catalogue

TIMEOUT = 600
"""Seconds of one test or of one `threefold verify`."""
_LEFT_OUT = (".git", ".venv", "__pycache__", ".*_cache", "*.egg-info", "demo", "build", "dist")
_BROKEN = ("SyntaxError", "NameError", "ImportError", "ModuleNotFoundError", "AttributeError", "UnboundLocalError")
"""Errors of a mistake that is written wrongly, rather than of one that computes something else."""


@dataclass(frozen=True)
class Found:
    """What a test or verify made of a mistake.

    Attributes:
        caught: whether it was found.
        how: the first line of the failure, or why it does not count.
        seconds: that it took.
    """

    caught: bool
    how: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What was found of one mistake; None for what was not run."""

    mistake: Mistake
    test: Found | None
    verify: Found | None


class Copy:
    """A copy of the repository in which mistakes are made.

    Args:
        folder: for it.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "copy"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.mutations.warm"],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": f"{self.root}{os.pathsep}{self.root / 'parity'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()
        _, where = self._run("tests.mutations.where", [])
        if lost := [path for path in where.split() if not Path(path).is_relative_to(self.root)]:
            raise RuntimeError(f"a package is imported from {lost[0]}, not from its copy in {self.root}")

    def close(self) -> None:
        """End its server."""
        self._server.communicate()

    @contextmanager
    def with_mistake(self, mistake: Mistake) -> Iterator[None]:
        """Have the mistake in the copy within the block."""
        before = mistake.put_into(self.root)
        try:
            self._forget_compiled(mistake.file)
            yield
        finally:
            (self.root / mistake.file).write_text(before, encoding="utf-8")
            self._forget_compiled(mistake.file)

    def _forget_compiled(self, file: str) -> None:
        """Python compares sizes and whole seconds alone, which may be equal with and without the mistake."""
        path = self.root / file
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def test(self, tests: Sequence[str]) -> dict[str, str]:
        """Run tests; returns the failure of each that failed, `""` for one of `tests` that was not found.

        Raises:
            TimeoutError: they took too long.
        """
        report = self.root.parent / "report.xml"
        report.unlink(missing_ok=True)
        options = ["-q", "-p", "no:cacheprovider", "--tb=short", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        status, output = self._run("pytest", [*options, *tests], TIMEOUT * max(1, len(tests) // 4))
        if not report.exists():
            return {"": output[-2000:]}
        failures, ran = {}, 0
        for case in ElementTree.parse(report).iter("testcase"):
            ran += 1
            for kind in ("failure", "error"):
                for element in case.iter(kind):
                    text = f"{element.get('message', '')}\n{element.text}"
                    failures[f"{case.get('file')}::{case.get('name')}"] = (
                        "" if kind == "failure" else "set-up: "
                    ) + text
        return failures if ran >= len(tests) and status in (0, 1) else {**failures, "": output[-2000:]}

    def verify(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Run `threefold verify`; returns its exit status, and what departs."""
        config, *layouts = arguments
        path = self.root / "tests" / "mutations" / "configs" / config
        status, output = self._run("threefold", ["verify", str(path), *layouts, "--json"])
        try:
            return status, _departure(json.loads(output[output.index("{") :]))
        except ValueError:
            return status, " ".join(output.split())[-300:]

    def _run(self, module: str, arguments: Sequence[str], timeout: float = TIMEOUT) -> tuple[int, str]:
        """Exit status and output of a Python module; its whole process group is ended with it."""
        assert self._server.stdin is not None
        output = self.root.parent / "output.txt"
        request = {"module": module, "arguments": [*arguments], "output": str(output)}
        print(json.dumps(request), file=self._server.stdin, flush=True)
        process, late = self._answer(), threading.Event()

        def end() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(timeout, end)
        timer.start()
        status = self._answer()
        timer.cancel()
        _kill(process)  # what it may have left
        if late.is_set():
            raise TimeoutError(f"no end after {timeout:g} s")
        return status, output.read_text(encoding="utf-8", errors="replace")

    def _answer(self) -> int:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError("the process that runs the tests has ended")
        return int(line.strip() or 0)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _departure(document: dict) -> str:
    """The first departure of a document of `threefold verify --json`, or its first error."""
    for layout in document["layouts"]:
        first = layout["first_departure"]
        if layout["verdict"] == "departs" and first is not None:
            what = " ".join(filter(None, (first["what"], first["parameter"])))
            much = first["values"] if "values" in first else f"{first['relative']:.1e}"  # of bits, with --exact
            return f"{layout['layout']}: step {first['step']} {what}, {much}"
        if layout["verdict"] != "equal":
            return f"{layout['layout']}: {layout['verdict']}: {' '.join(str(layout['message']).split())[-300:]}"
    return ""


def test_with(copy: Copy, mistake: Mistake) -> Found:
    """Whether the named test fails, the mistake being in the copy."""
    begun = monotonic()
    try:
        failures = copy.test([mistake.test])
    except TimeoutError as late:
        return Found(False, str(late), monotonic() - begun)
    seconds = monotonic() - begun
    if not failures:
        return Found(False, "the test passes", seconds)
    failure = next(iter(failures.values()))
    broken = _broken(failure)
    if "" in failures or broken or failure.startswith("set-up: "):
        return Found(False, f"no failure of the test itself: {broken or failure[-600:]}", seconds)
    return Found(True, _reason(failure), seconds)


def _reason(failure: str) -> str:
    """The error of a test as a line; of one that a rank raised, the rank's own."""
    raised = [line.removeprefix("E").strip() for line in failure.splitlines() if line.startswith("E ")]
    first = failure.strip().splitlines()[0]
    ranks = [line for line in raised if "Error" in line.partition(":")[0]]
    return (ranks[-1] if "WorkerError" in first and ranks else first)[:160]


def verify_with(copy: Copy, mistake: Mistake) -> Found:
    """Whether `threefold verify` finds a departure, the mistake being in the copy."""
    begun = monotonic()
    try:
        status, how = copy.verify(mistake.command)
    except TimeoutError as late:
        return Found(False, str(late), monotonic() - begun)
    caught = status == 1 and not _broken(how)
    return Found(caught, how or ("equal" if status == 0 else f"exit status {status}"), monotonic() - begun)


def _broken(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if any(f"{each}:" in line for each in _BROKEN)), "")


def check_unchanged(copy: Copy, mistakes: Sequence[Mistake], tests: bool, verify: bool) -> list[str]:
    """What is wrong without a mistake: tests that fail, and commands that find a departure."""
    wrong = []
    if tests:
        named = list(dict.fromkeys(mistake.test for mistake in mistakes))
        wrong += [f"{name or 'pytest'}: {text[-1500:]}" for name, text in copy.test(named).items()]
    for command in dict.fromkeys(tuple(mistake.command) for mistake in mistakes) if verify else ():
        if command:
            status, how = copy.verify(command)
            wrong += [f"threefold verify {' '.join(command)}: {how}"] if status else []
    return wrong


def judged(copy: Copy, mistake: Mistake, tests: bool = True, verify: bool = True) -> Verdict:
    """Make the mistake in the copy, and see what finds it."""
    with copy.with_mistake(mistake):
        found = test_with(copy, mistake) if tests else None
        departs = verify_with(copy, mistake) if verify and mistake.command else None
    return Verdict(mistake, found, departs)


def judge_all(
    copies: Sequence[Copy], mistakes: Sequence[Mistake], tests: bool, verify: bool, show: Callable[[Verdict], None]
) -> list[Verdict]:
    """Judge mistakes, one in each copy at a time."""
    free: queue.Queue[Copy] = queue.Queue()
    for copy in copies:
        free.put(copy)

    def judge(mistake: Mistake) -> Verdict:
        copy = free.get()
        try:
            return judged(copy, mistake, tests, verify)
        finally:
            free.put(copy)

    verdicts = []
    with ThreadPoolExecutor(len(copies)) as pool:
        for done in as_completed([pool.submit(judge, mistake) for mistake in mistakes]):
            verdicts.append(done.result())
            show(verdicts[-1])
    return sorted(verdicts, key=lambda verdict: mistakes.index(verdict.mistake))


def main() -> None:
    """Run the command line."""
    arguments = _arguments()
    console, everything = Console(width=160 if not sys.stdout.isatty() else None), catalogue()
    mistakes = [each for each in everything if not arguments.only or {each.name, each.subject} & {*arguments.only}]
    if not mistakes:
        sys.exit(f"--only is {' '.join(arguments.only)} but there is no such mistake or subject")
    tests, verify = not arguments.verify_only, not arguments.test_only
    begun = monotonic()
    with tempfile.TemporaryDirectory(prefix="threefold-mutations-") as folder:
        copies = [Copy(Path(tempfile.mkdtemp(dir=folder))) for _ in range(min(arguments.jobs, len(mistakes)))]
        if not arguments.no_baseline:
            console.print(f"Without a mistake: {len(mistakes)} tests and verify commands …")
            wrong = check_unchanged(copies[0], mistakes, tests, verify)
            if wrong:
                sys.exit("\n\n".join(["Without a mistake this has to pass:", *wrong]))
        columns = TextColumn("mistakes"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("mistakes", total=len(mistakes))

            def show(verdict: Verdict) -> None:
                progress.console.print(_line(verdict), highlight=False, markup=False, soft_wrap=True)
                progress.advance(task)

            verdicts = judge_all(copies, mistakes, tests, verify, show)
        for copy in copies:
            copy.close()
    console.print(_table(verdicts))
    sys.exit(_sum_up(console, verdicts, monotonic() - begun))


def _line(verdict: Verdict) -> str:
    parts = [verdict.mistake.name]
    for kind, found in (("test", verdict.test), ("verify", verdict.verify)):
        if found is not None:
            parts.append(f"{kind} {'✓' if found.caught else '✗'} {found.seconds:.0f} s ({found.how})")
    return " · ".join(parts)


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table("mistake", "subject", "test", "verify", box=None)
    for verdict in verdicts:
        shown = ["·" if each is None else "✓" if each.caught else "✗" for each in (verdict.test, verdict.verify)]
        table.add_row(verdict.mistake.name, verdict.mistake.subject, *shown)
    return table


def _sum_up(console: Console, verdicts: Sequence[Verdict], seconds: float) -> int:
    """Print what share was found; returns the exit status."""
    tested = [verdict for verdict in verdicts if verdict.test is not None]
    missed = [verdict.mistake.name for verdict in tested if verdict.test is not None and not verdict.test.caught]
    applies = [verdict for verdict in verdicts if not verdict.mistake.verify.startswith("no: ")]
    seen = sum(verdict.verify is not None and verdict.verify.caught for verdict in applies)
    if tested:
        console.print(f"{len(tested) - len(missed)} of {len(tested)} mistakes are found by their tests.")
    if any(verdict.verify is not None for verdict in verdicts):
        console.print(
            f"{seen} of {len(applies)} that concern verify are found by it ({100 * seen / len(applies):.0f} %)."
        )
    console.print(f"{seconds / 60:.0f} minutes.")
    if missed:
        console.print(f"Not found by the named test: {', '.join(missed)}")
    return 1 if missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a mistake or a subject; repeatable"
    )
    parser.add_argument("--jobs", type=int, default=2, help="mistakes at a time, each in a copy of its own (default 2)")
    parser.add_argument("--test-only", action="store_true", help="without threefold verify")
    parser.add_argument("--verify-only", action="store_true", help="without the tests")
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not check first that all passes without a mistake"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""`threefold-parity`: compare the training runs of any scripts that have a recorder."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

from threefold_parity import __version__
from threefold_parity.text import UserError, counted, format_bytes, parse_bytes, shown

_STATUS: Final = """
Exit status: 0 if the runs are equal up to rounding; 1 if they depart; 2 if they cannot be compared."""
_RUN: Final = """
Run two training scripts from the same initial weights, and compare what they compute.

With --after, each run keeps its own weights, so that a resumed run can be compared with an uninterrupted one.

Each script makes a Recorder of its model; runs of `threefold train` record themselves. In a command, {run} stands for a
folder for that run's own files. The reference runs again with noise in the last place of every activation and gradient,
to learn how large rounding errors become.

Example: threefold-parity run --reference 'python a.py' --candidate ./b.sh
"""
_COMPARE: Final = """
Compare two records, such as those of two layouts, versions, machines or precisions, or of a resumed run.

Without --noise, tolerances follow from the precision and widen for later steps, and may hide small wrong factors.
"""
_GENERATOR: Final = '<meta name="generator" content="threefold '


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; an error is one line on standard error."""
    try:
        status = run_command(arguments)
        sys.stdout.flush()
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader closed standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    return status


def run_command(arguments: Sequence[str] | None, program: str = "threefold-parity") -> int:
    """Run the command and return its exit status; a `UserError` is left to the caller."""
    given = parser_of(program).parse_args(arguments)
    if given.html is not None:
        _require_page(given.html)
    status: int = given.call(given)
    return status


def parser_of(program: str) -> argparse.ArgumentParser:
    """Return the parser of the command's arguments; `program` is its name in help texts."""
    parser = argparse.ArgumentParser(program, description="Compare training runs of any scripts that have a recorder.")
    parser.add_argument("--version", action="version", version=f"threefold-parity {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, text: str, call: Callable[[argparse.Namespace], int]) -> Callable[..., Any]:
        text = (text + _STATUS).replace("threefold-parity", program).strip()
        summary = text.partition("\n")[0]
        made = commands.add_parser(name, help=summary, description=text, formatter_class=_Paragraphs)
        made.set_defaults(call=call)
        return made.add_argument

    add = command("run", _RUN, _run)
    add("--reference", metavar="COMMAND", required=True, help="command of the reference run, taken to be right")
    add("--candidate", metavar="COMMAND", required=True, help="command of the run to check")
    add("--steps", metavar="N", type=_whole(1, 1000), default=3, help="steps to record and compare (default: 3)")
    noise = "further runs of the reference, with noise in the last place (default: 2)"
    add("--noise", metavar="N", type=_whole(0, 100), default=2, help=noise)
    after = "record the steps after this many updates, as for a resumed run"
    add("--after", metavar="UPDATES", type=_whole(0), default=0, help=after)
    whole = (
        "size of the tensors that the record of each rank keeps whole, such as 200MB (default: tensors of up to 4096 "
    )
    add("--whole", metavar="SIZE", help=f"{whole}elements, activations of up to 256; of larger ones samples)")
    wide = "also run a step of the reference in fp64, to learn how large rounding errors are (default: if its script "
    add("--wide", action=argparse.BooleanOptionalAction, help=f"{wide}supports it)")
    out = "folder in which to keep records and logs (default: not kept)"
    add("--out", metavar="FOLDER", type=Path, help=out)
    add("--timeout", metavar="SECONDS", type=float, help="time limit of each run (default: none)")
    add("--whole-run", action="store_true", help="let the scripts continue after the recorded steps")
    _output(add)

    add = command("compare", _COMPARE, _compare)
    add("reference", metavar="REFERENCE", type=Path, help="record of the reference run, taken to be right")
    add("candidate", metavar="CANDIDATE", type=Path, help="record of the run to check")
    noise = "record of the reference with noise; may be repeated"
    add("--noise", metavar="RECORD", type=Path, action="append", default=[], help=noise)
    add("--wide", metavar="RECORD", type=Path, help="record of the reference in fp64")
    add("--steps", metavar="N", type=_whole(1), help="steps to compare (default: all that both recorded)")
    _output(add)
    return parser


class _Paragraphs(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(_Paragraphs, self)._fill_text(each, width, indent) for each in text.split("\n\n"))


def _output(add: Callable[..., Any]) -> None:
    add("--html", metavar="FILE", type=Path, help="write a page with the modules, coloured by departure")
    add("--json", action="store_true", help="print a JSON document instead of a table")


def _whole(least: int, most: int = 10**9) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{shown(text)!r} is not a whole number from {least} to {most}")
        return int(text)

    return number


def _run(given: argparse.Namespace) -> int:
    from threefold_parity.run import run_both

    folder = Path(mkdtemp(prefix="threefold-parity-")) if given.out is None else given.out
    failed = False
    try:
        whole = 0 if given.whole is None else parse_bytes(given.whole)
    except ValueError as error:
        raise UserError(f"--whole {error}; use 500MB.") from None
    try:
        with _progress("Running", given.noise + 2 + (given.wide is not False), lines=given.json) as advance:
            limits = {"timeout": given.timeout, "whole_run": given.whole_run, "tell": advance}
            extent = {"steps": given.steps, "noise": given.noise, "after": given.after, "whole": whole}
            runs = run_both(given.reference, given.candidate, folder, **extent, wide=given.wide, **limits)
        status = _report(given, runs.reference, runs.candidate, list(runs.noisy), runs.wide, runs.note)
        if given.out is not None and not given.json:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            print(f"Records and logs: {folder} ({format_bytes(size)}).")
        return status
    except UserError:
        failed = True
        raise
    finally:
        if given.out is None:  # the logs stay that a message names
            logs = failed and any(folder.glob("*.log"))
            for path in [each for each in folder.iterdir() if each.is_dir()] if logs else [folder]:
                shutil.rmtree(path, ignore_errors=True)


def _compare(given: argparse.Namespace) -> int:
    from threefold_parity.record import Record

    noisy, wide = [Record(path) for path in given.noise], None if given.wide is None else Record(given.wide)
    return _report(given, Record(given.reference), Record(given.candidate), noisy, wide, steps=given.steps)


def _report(
    given: argparse.Namespace,
    reference: Any,
    candidate: Any,
    noisy: list[Any],
    wide: Any = None,
    note: str = "",
    steps: int | None = None,
) -> int:
    from threefold_parity.compare import compare
    from threefold_parity.verdict import judge, write_page

    with _progress("Comparing", 1 + (steps or reference.steps)) as advance:
        found = compare(reference, candidate, noisy, steps, wide, lambda: advance(""))
    found.notes += [note] if note else []
    verdict = judge(found)
    if given.html is not None:
        write_page(given.html, verdict, found, reference, candidate)
    if given.json:
        print(json.dumps(verdict.document(found), indent=2))
    else:
        _print(given, verdict, found, reference, candidate, len(noisy), wide is not None)
    return int(not verdict.equal)


def _print(
    given: argparse.Namespace, verdict: Any, found: Any, reference: Any, candidate: Any, noisy: int, wide: bool
) -> None:
    from threefold_parity.verdict import compared_whole, print_rows

    ranks = [counted(len(each.ranks), "rank") for each in (reference, candidate)]
    learned = f"tolerances learned from {counted(noisy, 'run')} with noise" if noisy else "default tolerances"
    learned += " and one in fp64" if noisy and wide else ""
    print(f"Compared {counted(found.steps, 'step')}: {ranks[0]} (reference) with {ranks[1]}; {learned}.")
    print(verdict.sentence)
    if not verdict.equal:
        print_rows(verdict, found)
    if reference.facts.get("whole"):
        print(compared_whole(found))
    for each in found.notes:
        print(f"Note: {each}")
    if given.html is not None:
        print(f"Page: {given.html}")


def _require_page(path: Path) -> None:
    """Raise a `UserError` unless a page can be written to a path: over nothing but another such page."""
    named = f"--html {shown(path)}"
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "that is a folder" if path.is_dir() else f"there is no folder {shown(path.parent)}"
        raise UserError(f"{named} cannot be written: {what}.")
    if path.exists() and not (path.is_file() and _GENERATOR.encode() in path.read_bytes()[:1000]):
        raise UserError(f"{named} exists already and is not a page of this program; use another name.")


@contextmanager
def _progress(doing: str, total: int, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Show a transient bar on a terminal; with `lines`, a line for each part where standard error is none.

    The function that it yields is called at the beginning of a part with a description, or after a step with none.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console, done = Console(stderr=True), 0
    columns = TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn()
    # Without a thread that refreshes it: processes are started beside it.
    bars = Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal)
    task = bars.add_task(doing, total=total)

    def advance(part: str) -> None:
        nonlocal done
        bars.update(task, description=f"{doing} {part}", completed=done + (not part), refresh=True)
        if lines and not console.is_terminal:
            print(f"{doing} {part} ({done} of {total} done)", file=sys.stderr, flush=True)
        done += 1

    with bars:
        yield advance

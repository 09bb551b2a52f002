"""`threefold parity`: compare the training runs of any scripts that have a recorder."""

import json
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from threefold.command_line import CommandLine
from threefold.errors import UserError
from threefold.files import counted, format_bytes
from threefold.terminal import AsJson, Steps, byte_size, print_table, require_page

if TYPE_CHECKING:
    from threefold.parity.record import Record

app = CommandLine(help="Compare training runs of any scripts that have a recorder (docs/parity.md).")

Page = Annotated[
    Path | None, Option("--html", metavar="FILE", help="Write a page with the modules, coloured by departure.")
]


@app.command()
def run(
    reference: str = Option(
        ..., metavar="COMMAND", help="Command of the reference run, which is taken to be right.", show_default=False
    ),
    candidate: str = Option(..., metavar="COMMAND", help="Command of the run to check.", show_default=False),
    steps: int = Option(3, min=1, max=1000, help="Steps to record and compare."),
    noise: int = Option(2, min=0, max=100, help="Further runs of the reference, with noise in the last place."),
    after: int = Option(
        0, min=0, metavar="UPDATES", help="Record the steps after this many updates, as for a resumed run."
    ),
    whole: str | None = Option(
        None,
        metavar="SIZE",
        help="Size of the tensors that the record of each rank keeps whole, such as 200MB.",
        show_default="tensors of up to 4096 elements, activations of up to 256; of larger ones samples",
    ),
    wide: bool | None = Option(
        None,
        "--wide/--no-wide",
        help="Also run a step of the reference in fp64, to learn how large rounding errors are.",
        show_default="if its script supports it",
    ),
    out: Path | None = Option(
        None, metavar="FOLDER", help="Folder in which to keep records and logs.", show_default="not kept"
    ),
    page: Page = None,
    timeout: float | None = Option(None, min=1, metavar="SECONDS", help="Time limit of each run.", show_default="none"),
    whole_run: bool = Option(False, "--whole-run", help="Let the scripts continue after the recorded steps."),
    as_json: AsJson = False,
) -> None:
    """Run two training scripts from the same initial weights, and compare what they compute.

    With --after, each run keeps its own weights, so that a resumed run can be compared with an uninterrupted
    one.

    Each script makes a `parity.Recorder` of its model (docs/parity.md); runs of `threefold train` record themselves. In
    a command, {run} stands for a folder for that run's own files. The reference runs again with noise in the last
    place of every activation and gradient, to learn how large rounding errors become.
    Exit status: 0 if the runs are equal up to rounding; 1 if they depart; 2 if they cannot be compared.

    Examples:
      threefold parity run --reference 'python a.py' --candidate 'python b.py'
    """
    from threefold.parity.run import run_both

    if page is not None:
        require_page(page)
    folder = Path(mkdtemp(prefix="threefold-parity-")) if out is None else out
    doing = {"reference": "Reference", "candidate": "Candidate"}
    failed = False
    try:
        runs_in_all = noise + 2 + (wide is not False)
        with Steps("Running", runs_in_all, lines=as_json) as bar:
            begun = 0

            def tell(name: str) -> None:
                nonlocal begun
                bar.tell(doing.get(name, f"Reference, {name}"), begun, runs_in_all)
                begun += 1

            runs = run_both(
                reference,
                candidate,
                folder,
                steps=steps,
                noise=noise,
                after=after,
                whole=0 if whole is None else byte_size(whole, "--whole", "500MB"),
                wide=wide,
                timeout=timeout,
                whole_run=whole_run,
                tell=tell,
            )
        _report(runs.reference, runs.candidate, list(runs.noisy), None, page, as_json, runs.wide, runs.note)
        if out is not None and not as_json:
            size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
            typer.echo(f"Records and logs: {out} ({format_bytes(size)}).")
    except UserError:
        failed = True
        raise
    finally:
        if out is None:  # the logs stay that a message names
            logs = failed and any(folder.glob("*.log"))
            for path in [each for each in folder.iterdir() if each.is_dir()] if logs else [folder]:
                shutil.rmtree(path, ignore_errors=True)


@app.command()
def compare(
    reference: Path = Argument(
        ..., metavar="REFERENCE", help="Record of the reference run, which is taken to be right."
    ),
    candidate: Path = Argument(..., metavar="CANDIDATE", help="Record of the run to check."),
    noise: list[Path] | None = Option(
        None, metavar="RECORD", help="Record of the reference with noise; may be repeated."
    ),
    wide: Path | None = Option(None, metavar="RECORD", help="Record of the reference in fp64.", show_default=False),
    steps: int | None = Option(None, min=1, help="Steps to compare.", show_default="all steps that both recorded"),
    page: Page = None,
    as_json: AsJson = False,
) -> None:
    """Compare two records, such as those of two layouts, versions, machines or precisions, or of a resumed run.

    Without --noise, tolerances follow from the precision and widen for later steps, and may hide small wrong
    factors.
    Exit status: 0 if the records are equal up to rounding; 1 if they depart; 2 if they cannot be compared.
    """
    from threefold.parity.record import Record

    if page is not None:
        require_page(page)
    noisy, in_fp64 = [Record(path) for path in noise or ()], None if wide is None else Record(wide)
    _report(Record(reference), Record(candidate), noisy, steps, page, as_json, in_fp64)


def _report(
    reference: "Record",
    candidate: "Record",
    noisy: "list[Record]",
    steps: int | None,
    page: Path | None,
    as_json: bool,
    wide: "Record | None" = None,
    note: str = "",
) -> None:
    from threefold.parity.compare import compare as compare_records
    from threefold.parity.verdict import compared_whole, judge, rows, write_page

    with Steps("Comparing", 1 + (steps or reference.steps)) as bar:
        found = compare_records(reference, candidate, noisy, steps, wide, bar.advance)
    found.notes += [note] if note else []
    verdict = judge(found)
    if page is not None:
        write_page(page, verdict, found, reference, candidate)
    if as_json:
        typer.echo(json.dumps(verdict.document(found), indent=2))
    else:
        ranks = [counted(len(each.ranks), "rank") for each in (reference, candidate)]
        learned = f"tolerances learned from {counted(len(noisy), 'run')} with noise" if noisy else "default tolerances"
        learned += " and one in fp64" if noisy and wide is not None else ""
        typer.echo(f"Compared {counted(found.steps, 'step')}: {ranks[0]} (reference) with {ranks[1]}; {learned}.")
        typer.echo(verdict.sentence)
        if not verdict.equal:
            print_table(("step", "what departs", "error", "rounding", "shape"), rows(verdict, found))
        if reference.facts.get("whole"):
            typer.echo(compared_whole(found))
        for note in found.notes:
            typer.echo(f"Note: {note}")
        if page is not None:
            typer.echo(f"Page: {page}")
    if not verdict.equal:
        raise typer.Exit(1)

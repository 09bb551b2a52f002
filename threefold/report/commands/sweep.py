"""`threefold sweep`: a run for each combination of values of some settings, and a page that compares them."""

import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import typer
from typer import Option

from threefold.errors import OutputLost, UserError
from threefold.files import counted, shown
from threefold.foreign import write_nofollow
from threefold.report.door import REPORT_FILE
from threefold.report.options import whole_number
from threefold.terminal import Bars, ConfigFile, ModelFile, TrustCode, read_config, table


def command(
    config: ConfigFile,
    settings: list[str] = Option(
        ..., "--set", metavar="SECTION.KEY=VALUE,VALUE…", help="Values of a setting, between commas; may be repeated."
    ),
    sweep_dir: Path | None = Option(
        None, metavar="SWEEP", help="Folder of the sweep.", show_default="runs/NAME-sweep for NAME.yaml"
    ),
    jobs: str = Option("1", metavar="N", help="Runs at the same time."),
    model: ModelFile = None,
    trust_code: TrustCode = False,
) -> None:
    """Train CONFIG once for each combination of the values, one run after another, and compare the runs on a page.

    Started again with the same values, it continues: finished runs are not repeated, others resume from their newest
    checkpoint. A run that fails ends no other; it is named in the end, and the exit status is 1.

    Examples:
      threefold sweep my.yaml --set optimizer.lr=1e-3,3e-3 --set train.seed=1,2
      threefold sweep my.yaml --set model.num_layers=4,8 --jobs 2
    """
    from rich.console import Console

    from threefold.launch.checks import checked
    from threefold.launch.environment import find_launched_rank
    from threefold.launch.run_folder import require_place
    from threefold.report.document import make_page, report_of
    from threefold.report.record import RunRecord, require_run
    from threefold.report.sweep import FAILED, LOGS, Sweep, Swept, outcomes

    if find_launched_rank() is not None:
        raise UserError("threefold sweep starts each run itself; call it without torchrun or srun.")
    at_once, folder = whole_number(jobs, "--jobs", most=1000), sweep_dir or Path("runs") / f"{config.stem}-sweep"
    runs = Swept.parse(settings).runs()
    with Bars() as bars:
        for run in runs:
            given = read_config(config, run.overrides, model, trust_code)
            checked(given, bars)
            run.config = sha256(given.to_yaml().encode()).hexdigest()
    require_place(folder)
    extra = [*(("--model", model) if model else ()), *(("--trust-code",) if trust_code else ())]
    is_live = sys.stdout.isatty()
    sweep = Sweep(config, folder, runs, extra, _say, _show if is_live else None)
    sweep.begin()
    _say(f"{counted(len(runs), 'run')} in {shown(folder)}")
    sweep.make(at_once)
    records = []
    for run in runs:
        with suppress(UserError):
            require_run(folder / run.name)
            records.append(RunRecord(folder / run.name, ended=True))
            records[-1].update()
    if records:
        document = report_of(records)
        document["outcomes"] = found = outcomes(runs, document)
        rows = [tuple(each if isinstance(each, str) else _number(each) for each in row[1:]) for row in found["rows"]]
        align = "l" * (1 + len(runs[0].settings)) + "rrr"
        Console().print(table(tuple(found["columns"][1:]), rows, align))
        try:
            write_nofollow(folder / REPORT_FILE, make_page(document))
        except OSError as error:
            raise UserError(f"--sweep-dir {shown(folder)} cannot be written: {error.strerror}.") from None
        _say(f"Wrote {shown(folder / REPORT_FILE)}.")
    failed = [run for run in runs if run.state == FAILED]
    for run in failed:
        _say(
            f"{run.name} failed: {run.reason.partition(';')[0].rstrip('.')}; see {shown(folder / LOGS / run.name)}.log."
        )
    if sweep.was_stopped:
        _say("Stopped; the same command continues the sweep.")
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _say(line: str) -> None:
    with suppress(OutputLost):
        typer.echo(f"\r\x1b[K{line}" if sys.stdout.isatty() else line)


def _show(line: str) -> None:
    from shutil import get_terminal_size

    with suppress(OutputLost, OSError):
        sys.stdout.write(f"\r\x1b[K{line[: get_terminal_size().columns - 1]}")
        sys.stdout.flush()

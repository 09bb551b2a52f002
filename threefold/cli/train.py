"""`threefold train`: train a model from a config."""

import re
import shlex
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import typer
from typer import Option

from threefold.command_line import HelpedCommand
from threefold.doors import hook
from threefold.errors import OutputLost, UserError
from threefold.files import shown
from threefold.terminal import Bars, ConfigFile, ModelFile, Overrides, TrustCode, read_config, require_ranks

_NUMBER: Final = re.compile(r"[+-]?\d+")
_PROFILE_STEPS: Final = 3
_LOOK_INSIDE: Final = "Look inside"
_MOST_PROFILED: Final = 100
"""Limit on `--profile`; longer traces do not open in a browser."""


class Parser(HelpedCommand):
    """Parser for `--resume` and `--profile` without a value.

    `--resume` means `--resume=yes` and takes no next argument; `--profile` means `--profile=3`, or takes a number.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        head: list[str] = []
        for argument in args[:end]:
            if head and head[-1] == "--profile":
                head[-1] = f"--profile={argument if _NUMBER.fullmatch(argument) else _PROFILE_STEPS}"
                if _NUMBER.fullmatch(argument):
                    continue
            head.append("--resume=yes" if argument == "--resume" else argument)
        if head and head[-1] == "--profile":
            head[-1] = f"--profile={_PROFILE_STEPS}"
        return super().parse_args(ctx, [*head, *args[end:]])


def command(
    config: ConfigFile,
    run_dir: Path | None = Option(None, metavar="RUN", help="Run folder.", show_default="runs/NAME for NAME.yaml"),
    model: ModelFile = None,
    trust_code: TrustCode = False,
    overrides: Overrides = None,
    resume: Literal["no", "yes", "auto"] = Option(
        "no",
        metavar="[=auto]",
        help="Resume from the newest checkpoint in RUN; with =auto, start a new run if there is none.",
        show_default=False,
    ),
    console_ranks: str = Option(
        "0",
        metavar="RANKS",
        help="Ranks whose output is shown, such as 0,3; RUN/logs has the output of all ranks.",
        rich_help_panel=_LOOK_INSIDE,
    ),
    profile: str | None = Option(
        None,
        metavar="[STEPS]",
        help=f"Profile STEPS steps ({_PROFILE_STEPS} if not given) after two warm-up steps. RUN/profile has a "
        "Perfetto trace of each rank, and a picture of the timeline of the stages.",
        rich_help_panel=_LOOK_INSIDE,
        show_default=False,
    ),
    debug_rank: int | None = Option(
        None,
        metavar="RANK",
        help="Attach the terminal to this rank, for breakpoint(); the others wait for it without a time limit.",
        rich_help_panel=_LOOK_INSIDE,
        show_default=False,
    ),
) -> None:
    """Train the model of CONFIG, on dp · tp · pp · cp local processes, or as ranks of torchrun or srun.

    SIGINT (Ctrl-C), SIGTERM or SIGUSR1 ends the run after the current step, with a checkpoint; a second signal
    ends it at once.

    Examples:
      threefold train run.yaml
      threefold train run.yaml --set parallel.tp=2 --run-dir runs/tp2
      threefold train run.yaml --resume
      torchrun --nproc-per-node 8 -m threefold train run.yaml
    """
    from threefold.launch.process import StopRequested, StopSignals

    folder, steps = run_dir or Path("runs") / config.stem, profile or "0"
    try:
        console = tuple(dict.fromkeys(int(rank) for rank in console_ranks.split(",") if rank.strip()))
    except ValueError:
        raise UserError(f"--console-ranks {shown(console_ranks)} must be ranks between commas, such as 0,3.") from None
    if profile is not None and not (steps.isdecimal() and 1 <= int(steps) <= _MOST_PROFILED):
        nearest = _MOST_PROFILED if steps.isdecimal() and int(steps) else 1
        raise UserError(
            f"--profile is {shown(profile)} but must be a number of steps from 1 to {_MOST_PROFILED}; use {nearest}."
        )
    with StopSignals() as signals:
        try:
            from threefold.config.model import CUSTOM
            from threefold.launch.environment import find_launched_rank
            from threefold.launch.run_folder import explain_early_stop, require_folder
            from threefold.launch.training_run import prepare_training

            given = read_config(config, overrides, model, trust_code)
            if model is None and resume != "no" and not given.model.file:
                from threefold.checkpoint.code import remembered_model

                require_folder(folder)
                # A config that names another architecture does not belong to the checkpoint; resuming reports that.
                of_another = given.is_given("model.architecture") and given.model.architecture != CUSTOM
                if not of_another and (remembered := remembered_model(folder, trust_code)):
                    given = read_config(config, overrides, remembered, trust_code)
            require_ranks(console, given, "--console-ranks has")
            if debug_rank is not None:
                require_ranks((debug_rank,), given, "--debug-rank is")
                if find_launched_rank() is not None:
                    raise UserError(
                        f"--debug-rank is {debug_rank} but a launcher has started the ranks, which have no terminal; "
                        "start the run on one machine without a launcher."
                    )
            with Bars() as bars:  # the bar's thread must end before the workers are forked
                resumes: bool | Literal["auto"] = "auto" if resume == "auto" else resume == "yes"
                run = prepare_training(given, folder, resume=resumes, progress=bars, profile_steps=int(steps), say=_say)
            if run.finished:
                made = run.config.train.max_steps
                _say(f"{folder} has completed all its {made:,} steps; there is nothing left to do.")
            if run.config.model.architecture == CUSTOM:
                run = replace(run, verify=hook("verify_run"))
            stopped = run.start(console, signals, debug_rank)
        except StopRequested as request:
            if not request.again:
                # Import nothing here, because the signal may have arrived during an import.
                _say(f"Stopped by {request} before training began; start again with:\n  {_command()}")
                raise typer.Exit(_status(request.number)) from None
            _explain(folder, request.number, None)
            raise typer.Exit(128 + request.number) from None
        if stopped and stopped.reason:
            _say(explain_early_stop(folder, stopped.step, stopped.reason))
        elif stopped:
            _explain(folder, stopped.limit or stopped.signal, stopped.step)
            raise typer.Exit(_status(stopped.signal))


def _explain(folder: Path, number: int | str, step: int | None) -> None:
    from threefold.launch.run_folder import explain_stop

    _say(explain_stop(folder, number, step, _command()))


def _status(number: int) -> int:
    return 128 + number if number == signal.SIGINT else 0


def _command() -> str:
    return shlex.join(["threefold", *sys.argv[1:]])


def _say(text: str) -> None:
    """Print a line once for all ranks."""
    from threefold.launch.environment import find_launched_rank

    launched = find_launched_rank()
    if launched is None or launched.rank == 0:
        with suppress(OutputLost):  # losing output does not end the run
            typer.echo(text)

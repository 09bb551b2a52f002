"""`threefold`: the commands, and the exit status of errors."""

import atexit
import errno
import gc
import os
import re
import resource
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import typer
from typer import Option

from threefold import __version__
from threefold.command_line import CommandLine, CommandTable, group_of
from threefold.doors import added, call_hook
from threefold.errors import CLOSED_OUTPUT, UserError
from threefold.files import on_one_line, shown
from threefold.terminal import forget_narrow_terminal, guard_streams

COMMANDS: Final = {
    "train": ("Train and use", "threefold.cli.train:command"),
    "data": ("Files", "threefold.cli.data:app"),
    "config": ("Files", "threefold.cli.config:app"),
}
"""Commands of the core, as `CommandTable` takes them; attached rooms add theirs (`threefold.doors`)."""
ORDER: Final = (
    *("init", "train", "sweep", "watch", "report", "generate", "chat", "eval", "inspect", "verify", "parity"),
    *("coordinates", "doctor", "plan", "show", "estimate", "simulate", "dry-run", "data", "checkpoint", "config"),
)
"""Commands in the order of the help; others follow."""
FAILED, MISUSED = 1, 2
_OF_A_PATH: Final = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EROFS)
"""Errors caused by a path that the user gave."""


def make_app(commands: Mapping[str, tuple[str, str]] | None = None) -> typer.Typer:
    """Return the command line with these commands (`COMMANDS`); None for all."""
    given = COMMANDS | added("COMMANDS") if commands is None else commands
    table = CommandTable({name: given[name] for name in (*filter(given.__contains__, ORDER), *given)})
    app = CommandLine(name="threefold", pretty_exceptions_enable=False, cls=group_of(table))
    app.callback()(_root)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"threefold {__version__}")
        raise typer.Exit


def _root(
    version: bool = Option(False, "--version", callback=_print_version, is_eager=True, help="Show the version."),
) -> None:
    """Train GPT-style language models in any data × tensor × pipeline parallel layout, with the same result."""


app = make_app()


def main() -> None:
    """Run the command in `sys.argv` and exit: 1 if a rank failed, 2 on a user error, 130 on Ctrl-C.

    Exits with 141, without a message, if the reader closed standard output.
    """
    guard_streams()
    forget_narrow_terminal()
    _let_threads_sleep()
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        call_hook("refuse_torch_without_space")
    # Otherwise garbage collection at exit goes through everything imported, which takes half a second with torch.
    atexit.register(gc.freeze)
    try:
        try:
            try:
                os.getcwd()  # without a working directory, the BLAS library ends the process
            except OSError as error:
                raise UserError(
                    f"The working directory cannot be used ({error.strerror}), as where it has been deleted; change to "
                    "one that exists, as with cd ~."
                ) from None
            app()  # turns Ctrl-C into its exit status
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _OF_A_PATH or error.filename is None:
            sys.exit(_tell(error))
        sys.exit(_tell(UserError(f"Cannot use {shown(os.fsdecode(error.filename))}: {error.strerror}")))
    except Exception as error:
        sys.exit(_tell(error))


def _let_threads_sleep() -> None:
    """Shorten the time in which idle threads of GNU OpenMP spin, unless the user chose how they wait.

    By default they spin for milliseconds, which takes the cores from other processes: three runs at a time on two cores
    took four to ten times as long as one, and take twice as long with this. A run on its own is as fast. OpenMP reads
    the variable when torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # iterations, some microseconds


def _tell(error: Exception) -> int:
    """Print an expected error on one line, and return the exit status."""
    from threefold.launch.environment import leave_to_first_rank, tell_waiting_ranks
    from threefold.launch.failure import RankFailed, formatted

    told = str(error)
    if isinstance(error, RankFailed):
        status = FAILED
    elif str(error) == CLOSED_OUTPUT:
        return 141  # exit status in a shell of a program that SIGPIPE ended
    elif isinstance(error, UserError):
        leave_to_first_rank()
        status = MISUSED
    elif variable := _refused_variable(error):
        leave_to_first_rank()
        status, told = MISUSED, variable
    elif limited := call_hook("explain_limit", error):
        leave_to_first_rank()
        status, told = FAILED, limited[0].upper() + limited[1:]
    else:
        with suppress(OSError):
            sys.stderr.write(formatted(error))
        return FAILED
    with suppress(OSError):  # standard error may be closed or full, too
        typer.echo(f"Error: {on_one_line(told)}{'' if told.endswith(('.', '!', '?')) else '.'}", err=True)
    if status == MISUSED:
        tell_waiting_ranks(told)
    return status


def _refused_variable(error: BaseException) -> str:
    """Return the sentence for an environment variable that torch refused on import; empty for another error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    if not any(str(frame.f_globals.get("__name__")).partition(".")[0] == "torch" for frame in frames):
        return ""
    text = " ".join(str(error).split())
    for name, value in os.environ.items():
        if name.startswith(("TORCH", "PYTORCH")) and (re.search(rf"\b{name}\b", text) or (value and value in text)):
            why = shown(text.removesuffix("."))
            return (
                f"The environment variable {name} is {shown(value) or 'empty'}, which torch refuses ({why}); unset it"
            )
    return ""

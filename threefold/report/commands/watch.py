"""`threefold watch`: progress of a run, in the terminal or in a browser."""

import time
from typing import Any, Final

import typer
from typer import Option

from threefold.command_line import HelpedCommand
from threefold.report.options import whole_number
from threefold.terminal import RunFolder

_PORT: Final = 6070


class _ServeParser(HelpedCommand):
    """Parser for `--serve` without a port, which means `--serve=6070`, or with one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = [
            f"--serve={_PORT}" if argument == "--serve" and not following.isdecimal() else argument
            for argument, following in zip(args, [*args[1:], ""], strict=True)
        ]
        return super().parse_args(ctx, given)


Parser = _ServeParser


def command(
    run: RunFolder,
    serve: str | None = Option(
        None,
        metavar="[PORT]",
        help=f"Serve its report page to browsers on this machine only (default port {_PORT}; 0: any).",
        show_default=False,
    ),
) -> None:
    """Follow RUN until it ends, with its newest step and its loss curve. Ctrl-C ends the watch, not the run.

    Examples:
      threefold watch runs/run
      threefold watch runs/run --serve 8080
    """
    port = None if serve is None else whole_number(serve, "--serve", 0, 65535)
    from threefold.report.live import LOOPBACK, RunServer, follow
    from threefold.report.record import RunRecord

    record = RunRecord(run)
    try:
        if port is None:
            follow(record, lambda: time.sleep(1.0))
        else:
            server = RunServer(record, port)
            typer.echo(f"Serving the report at http://{LOOPBACK}:{server.port}/ until Ctrl-C.")
            server.serve()
    except KeyboardInterrupt:
        raise typer.Exit(130) from None

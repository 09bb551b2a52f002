"""`threefold parity`: the command of the package `threefold-parity`."""

from types import ModuleType
from typing import Any

from typer import Exit

from threefold.command_line import HelpedCommand
from threefold.errors import UserError
from threefold.parity.door import MISSING


class _PassingParser(HelpedCommand):
    """Command that leaves its arguments, `--help` included, to the package."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = args
        return args

    def invoke(self, ctx: Any) -> None:
        package = _package()
        try:
            raise Exit(package.run_command(ctx.args, "threefold parity"))
        except package.UserError as error:
            raise UserError(str(error)) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_package().parser_of("threefold parity").format_help())


Parser = _PassingParser


def _package() -> ModuleType:
    try:
        import threefold_parity.command
    except ModuleNotFoundError:
        raise UserError(f"threefold parity {MISSING}") from None
    return threefold_parity.command


def command() -> None:
    """Compare training runs of any scripts that have a recorder (docs/parity.md)."""

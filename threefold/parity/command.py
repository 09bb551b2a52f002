"""`threefold parity`: the command of the package `threefold-parity`."""

from typing import Any

from typer import Exit

from threefold.command_line import HelpedCommand
from threefold.errors import UserError
from threefold.parity.door import MISSING


class Parser(HelpedCommand):
    """Command that leaves its arguments, `--help` included, to the package."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = args
        return args

    def invoke(self, ctx: Any) -> None:
        try:
            from threefold_parity.command import main
        except ModuleNotFoundError:
            raise UserError(f"threefold parity {MISSING}") from None
        raise Exit(main(ctx.args, "threefold parity"))


def command() -> None:
    """Compare training runs of any scripts that have a recorder (docs/parity.md)."""

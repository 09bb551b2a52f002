"""Contributions of reports to the core (`threefold.doors`)."""

from typing import Final

COMMANDS: Final = {
    "watch": ("Train and use", "threefold.report.commands.watch:command"),
    "report": ("Train and use", "threefold.report.commands.report:command"),
}
CALLBACKS: Final = {"report": "threefold.report.document:RunReport"}

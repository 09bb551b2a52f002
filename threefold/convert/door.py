"""Contributions of converters of other systems' configs to the core (`threefold.doors`)."""

from typing import Final

COMMANDS: Final = {"config convert": ("", "threefold.convert.command:command")}

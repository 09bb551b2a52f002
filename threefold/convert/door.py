"""What converters of other systems' configs add to the core (`threefold.doors`)."""

from typing import Final

COMMANDS: Final = {"config convert": ("", "threefold.convert.command:command")}

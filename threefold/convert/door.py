"""Contributions of converters of configs and checkpoints to the core (`threefold.doors`)."""

from typing import Final

COMMANDS: Final = {
    "config convert": ("", "threefold.convert.command:command"),
    "checkpoint convert": ("", "threefold.convert.checkpoint_command:convert"),
}

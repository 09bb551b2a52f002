"""Contributions of parity to the core (`threefold.doors`)."""

from typing import Final

COMMANDS: Final = {"parity": ("Check", "threefold.parity.command:app")}
ATTACHMENTS: Final = {"parity": "threefold.parity.of_threefold:Recording"}

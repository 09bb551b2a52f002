"""What parity adds to the core (`threefold.doors`)."""

from typing import Final

COMMANDS: Final = {"parity": ("Check", "threefold.parity.command:app")}

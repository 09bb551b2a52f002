"""Contributions of parity to the core (`threefold.doors`)."""

from typing import Final

COMMANDS: Final = {"parity": ("Check", "threefold.parity.command:command")}
ATTACHMENTS: Final = {"parity": "threefold.parity.attachment:Recording"}
MISSING: Final = "needs the package threefold-parity, which is not installed; use pip install ./parity in a clone."
"""End of a sentence about what the package is needed for."""

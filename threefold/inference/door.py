"""Contributions of inference to the core (`threefold.doors`)."""

from typing import Final

NEEDS: Final = ("huggingface", "report", "verify")
COMMANDS: Final = {
    "generate": ("Train and use", "threefold.inference.commands.generate:command"),
    "chat": ("Train and use", "threefold.inference.commands.chat:command"),
    "eval": ("Train and use", "threefold.inference.commands.eval:command"),
}

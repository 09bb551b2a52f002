"""Contributions of verification to the core (`threefold.doors`)."""

from typing import Final

COMMANDS: Final = {"verify": ("Check", "threefold.verify.command:command")}
HOOKS: Final = {
    "check_layout": "threefold.verify.self_check:self_check",
    "check_loop": "threefold.verify.loop_check:LoopCheck",
}
NAMES: Final = {"verify_model": "threefold.verify.api:verify_model"}
TYPES: Final = {"VerifiedModel": "threefold.verify.api:VerifiedModel"}

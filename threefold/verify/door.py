"""Contributions of verification to the core (`threefold.doors`)."""

from typing import Final

COMMANDS: Final = {
    "inspect": ("Check", "threefold.verify.inspect_command:command"),
    "verify": ("Check", "threefold.verify.command:command"),
}
HOOKS: Final = {
    "check_layout": "threefold.verify.self_check:self_check",
    "check_loop": "threefold.verify.loop_check:LoopCheck",
}
NAMES: Final = {
    "inspect": "threefold.verify.inspection:inspect",
    "verify_model": "threefold.verify.api:verify_model",
}
TYPES: Final = {
    "InspectedModule": "threefold.verify.inspection:InspectedModule",
    "Inspection": "threefold.verify.inspection:Inspection",
    "VerifiedModel": "threefold.verify.api:VerifiedModel",
}

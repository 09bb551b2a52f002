"""Contributions of verification to the core (`threefold.doors`)."""

from typing import Final

NEEDS: Final = ("adapters", "cpu", "exact", "huggingface", "report")
COMMANDS: Final = {
    "inspect": ("Check", "threefold.verify.inspect_command:command"),
    "verify": ("Check", "threefold.verify.command:command"),
    "coordinates": ("Check", "threefold.verify.coordinates:command"),
}
HOOKS: Final = {
    "verify_run": "threefold.verify.run_verification:verify_run",
    "check_model": "threefold.verify.module_check:check_model",
    "check_undecided": "threefold.verify.plan_check:check_undecided",
    "check_patterns": "threefold.verify.plan_check:check_patterns",
    "explaining_passes": "threefold.verify.module_check:explaining_passes",
    "check_plan": "threefold.verify.plan_check:check_plan",
    "check_cuts": "threefold.verify.plan_check:check_cuts",
    "check_forward": "threefold.verify.plan_check:check_forward",
    "dropout_parts": "threefold.verify.dropout_parts:dropout_parts",
    "verify_loop": "threefold.verify.loop_verification:LoopVerification",
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

"""Contributions of resilience to the core (`threefold.doors`)."""

from typing import Final

NEEDS: Final = ("exact",)
CALLBACKS: Final = {"stragglers": "threefold.resilience.stragglers:StragglerReport"}
ATTACHMENTS: Final = {"resilience": "threefold.resilience.attachment:FaultResponse"}
RULES: Final = {"skipped_steps": "threefold.resilience.rules:skipped_steps_rules"}
RUN_CHECKS: Final = {"fault_policies": "threefold.resilience.rules:check_fault_policies"}
HOOKS: Final = {
    "heartbeat": "threefold.resilience.heartbeat:PageHeartbeat",
    "require_room": "threefold.resilience.limits:require_room",
    "refuse_torch_without_space": "threefold.resilience.limits:refuse_torch_without_space",
    "explain_limit": "threefold.resilience.limits:explain_limit",
    "explain_exit": "threefold.resilience.limits:explain_exit",
    "require_same_processes": "threefold.resilience.agreement:require_same_processes",
    "require_same_arguments": "threefold.resilience.agreement:require_same_arguments",
    "address": "threefold.resilience.rules:require_address",
    "step_ranges": "threefold.resilience.rules:StepRanges",
    "kept_states": "threefold.resilience.states_in_memory:StatesInMemory",
    "fallbacks": "threefold.resilience.restarts:fallbacks_of",
    "in_world": "threefold.resilience.restarts:in_world",
    "restarts": "threefold.resilience.restarts:Restarts",
    "watch_local": "threefold.resilience.rank_watch:LocalWatch",
    "watch_launched": "threefold.resilience.rank_watch:watch_launched",
    "require_one_batch": "threefold.resilience.data_agreement:require_one_batch",
    "kept_generators": "threefold.resilience.kept_generators:KeptGenerators",
    "checks": "threefold.resilience.data_checks:RankChecks",
    "checkpoints": "threefold.resilience.saving:BackgroundCheckpoints",
    "background_saver": "threefold.resilience.background_saving:BackgroundSaver",
    "remote_copies": "threefold.resilience.remote_copier:RemoteCopies",
}

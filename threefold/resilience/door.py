"""Contributions of resilience to the core (`threefold.doors`)."""

from typing import Final

CALLBACKS: Final = {"stragglers": "threefold.resilience.stragglers:StragglerReport"}
ATTACHMENTS: Final = {"resilience": "threefold.resilience.attachment:FaultResponse"}
HOOKS: Final = {"held_states": "threefold.resilience.memory_copy:KeptStates"}

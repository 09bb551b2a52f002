"""Contributions of resilience to the core (`threefold.doors`)."""

from typing import Final

CALLBACKS: Final = {"stragglers": "threefold.resilience.stragglers:StragglerReport"}
ATTACHMENTS: Final = {"resilience": "threefold.resilience.attachment:FaultResponse"}
HOOKS: Final = {
    "held_states": "threefold.resilience.memory_copy:KeptStates",
    "watch_local": "threefold.resilience.rank_watch:LocalWatch",
    "watch_launched": "threefold.resilience.rank_watch:watch_launched",
    "remote_copies": "threefold.resilience.mirror:RemoteCopies",
}

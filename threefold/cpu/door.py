"""Contributions of transports for CPU ranks to the core (`threefold.doors`)."""

from typing import Final

HOOKS: Final = {
    "over_shared_memory": "threefold.cpu.shared_memory:over_shared_memory",
    "share_mailbox": "threefold.cpu.mailbox:share_mailbox",
    "register_staged": "threefold.cpu.staged:register_backend",
}

"""Contributions of transports and kernels for CPUs to the core (`threefold.doors`)."""

from typing import Final

HOOKS: Final = {
    "over_shared_memory": "threefold.cpu.shared_memory:over_shared_memory",
    "share_mailbox": "threefold.cpu.mailbox:share_mailbox",
    "register_staged": "threefold.cpu.staged:register_backend",
    "onednn_serves": "threefold.cpu.kernels:onednn_serves",
    "plain_attention_serves": "threefold.cpu.kernels:plain_attention_serves",
    "attention_tiles": "threefold.cpu.tiles:tiles",
    "tiled_attention": "threefold.cpu.tiles:tiled_attention",
    "dropped_attention": "threefold.cpu.dropped_attention:dropped_attention",
}

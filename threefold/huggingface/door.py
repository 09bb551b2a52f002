"""Contributions of models of Hugging Face to the core (`threefold.doors`)."""

from typing import Final

NEEDS: Final = ("adapters",)
COMMANDS: Final = {
    "checkpoint import": ("", "threefold.huggingface.commands:import_"),
    "checkpoint export": ("", "threefold.huggingface.commands:export"),
}
HOOKS: Final = {
    "try_tokenizer": "threefold.huggingface.tokenizer_check:try_tokenizer",
    "chat_of": "threefold.huggingface.conversations:chat_of",
    "chat_template": "threefold.huggingface.conversations:read_template",
    "packed_conversations": "threefold.huggingface.packed_conversations:PackedConversations",
    "chat_encoder": "threefold.huggingface.chat_encoder:ChatEncoder",
}

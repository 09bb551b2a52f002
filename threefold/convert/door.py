"""Contributions of converters of configs, token files and checkpoints to the core (`threefold.doors`)."""

from typing import Final

NEEDS: Final = ("huggingface", "report")
COMMANDS: Final = {
    "config convert": ("", "threefold.convert.command:command"),
    "data sample": ("", "threefold.convert.python_text:sample"),
    "data convert": ("", "threefold.convert.tokens_command:convert"),
    "checkpoint average": ("", "threefold.convert.checkpoint_command:average"),
    "checkpoint convert": ("", "threefold.convert.checkpoint_command:convert"),
}
HOOKS: Final = {
    "decompressed": "threefold.convert.compressed:decompressed",
    "parquet_texts": "threefold.convert.parquet:parquet_texts",
    "json_lines": "threefold.convert.json_lines:JsonLines",
    "audit_cache": "threefold.convert.token_cache:audit_cache",
    "is_megatron": "threefold.convert.megatron_command:is_megatron",
    "export_megatron": "threefold.convert.megatron_command:export_checkpoint",
    "import_megatron": "threefold.convert.megatron_command:import_checkpoint",
}
TOKEN_FORMATS: Final = {
    "megatron": "threefold.convert.megatron_tokens:MEGATRON",
    "paddlefleetx": "threefold.convert.paddlefleetx_tokens:PADDLEFLEETX",
    "paddlefleetx-npz": "threefold.convert.paddlefleetx_tokens:PADDLEFLEETX_NPZ",
}
SETTING_NAMES: Final = {"other_systems": "threefold.convert.setting_names:SETTING_NAMES"}

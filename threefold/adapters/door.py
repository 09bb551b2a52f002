"""Contributions of adapters to the core (`threefold.doors`)."""

from typing import Final

HOOKS: Final = {"adapted": "threefold.adapters.attach:adapted"}
NAMES: Final = {"add_adapter": "threefold.adapters.attach:add_adapter"}
RULES: Final = {"adapters": "threefold.adapters.rules:adapter_rules"}

"""Contributions of the calls of other systems to the core (`threefold.doors`)."""

from typing import Final

NAMES: Final = {"split": "threefold.compat.paddle:split"}

"""Prefixes of the names of a checkpoint's tensors: model weights and optimizer state."""

from typing import Final

MODEL: Final = "model."
OPTIMIZER: Final = "optimizer."

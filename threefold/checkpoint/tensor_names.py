"""What the names of a checkpoint's tensors begin with."""

from typing import Final

MODEL: Final = "model."
OPTIMIZER: Final = "optimizer."

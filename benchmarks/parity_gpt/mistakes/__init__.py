"""Real silent bugs of other systems: how each is put into the small GPT, and what a comparison should say of it.

Every row is a bug that shipped. Its key is the value of `--mistake`, and marks the condition in the code where the bug
sits. `right` are patterns of the names that lead to it, `shape` is a pattern of what may be said of its shape; rows
without one have none: the tensor is simply another.
"""

from typing import Final

from . import deepspeed, megatron, others, torch
from .in_threefold import IN_THREEFOLD
from .row import Row

ROWS: Final = (*megatron.ROWS, *deepspeed.ROWS, *torch.ROWS, *others.ROWS)

__all__ = ["IN_THREEFOLD", "ROWS", "Row"]

"""Constants shared by kernels, models and the planner, importable without torch."""

from typing import Final

IGNORE_INDEX: Final = -100
"""Label whose token adds nothing to the loss, like `ignore_index` of torch's losses."""


LOGITS_AT_ONCE: Final = 1 << 18
"""Logits that the loss processes at a time on a CPU: one megabyte in fp32, which fits the L2 caches of two cores."""
COMPILED: Final = 0
"""In place of a number of logits: the loss processes all of them in one pass of compiled code."""

"""Sizes that kernels and the planner's formulas have in common; without torch."""

from typing import Final

LOGITS_AT_ONCE: Final = 1 << 18
"""Logits that the loss goes over at once on a CPU: a megabyte in fp32, which the second-level caches of two cores
hold."""

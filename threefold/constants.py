"""Constants that kernels, models and the planner share; without torch."""

from typing import Final

IGNORE_INDEX: Final = -100
"""The ignored label: its token adds nothing to the loss. As `ignore_index` of torch's own losses."""


LOGITS_AT_ONCE: Final = 1 << 18
"""Logits that the loss goes over at once on a CPU: a megabyte in fp32, which the second-level caches of two cores
hold."""

"""Constants shared by kernels, models and the planner, importable without torch."""

from typing import Final

PARITY_WIDE: Final = "THREEFOLD_PARITY_WIDE"
"""Variable of the environment with which `threefold parity run` has a run compute in fp64."""
IGNORE_INDEX: Final = -100
"""Label whose token adds nothing to the loss, like `ignore_index` of torch's losses."""
LOGITS_AT_ONCE: Final = 1 << 18
"""Logits that the loss processes at a time on a CPU: one megabyte in fp32, which fits the L2 caches of two cores."""
COMPILED: Final = 0
"""In place of a number of logits: the loss processes all of them in one pass of compiled code."""
LOGITS_OF_A_CHUNK: Final = 1 << 28
"""Logits that the loss processes at a time on a GPU: one gibibyte in fp32. Chunks of few columns are slow, as each adds
to the gradients of all tokens."""
LONGEST_DOCUMENT: Final = 1 << 26
"""Characters that a line of JSON, or a rendered conversation, may have: a small compressed file can hold a line of any
length, which takes ten times its size in memory."""
MOST_IDS: Final = 2**31 - 1
"""Limit on the size of a vocabulary: token files have ids of 32 bits."""

STAGED_GLOO: Final = "staged_gloo"
"""Name, for `torch.distributed`, of the backend of `parallel.backend: gloo` on GPUs (`threefold.cpu.staged`)."""

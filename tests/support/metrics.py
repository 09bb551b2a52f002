"""Metrics of a run that two runs do not share."""

MEASURED = (  # keys of a step that measure time and hardware; all others are the same whenever the step is made
    "tokens_per_second",
    "seconds",
    "phases",
    "tflops",
    "mfu",
    "memory",
    "largest_memory",
    "largest_rank",
    "waited",
    "wall_clock",
)

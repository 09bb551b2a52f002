"""The work of `threefold checkpoint`: lists, describes, verifies and converts the checkpoints of a run."""

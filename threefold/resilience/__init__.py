"""Responses to faults of a run: bad steps, silent corruption, slow and lost ranks; copies of state and checkpoints."""

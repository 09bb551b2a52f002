"""Faults of a run: bad steps, silent corruption, slow and lost ranks; each answer to them is a callback of the run."""

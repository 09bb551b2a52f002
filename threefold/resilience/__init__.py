"""Faults of a run: bad steps, silent corruption, slow and lost ranks; each response is a callback of the run."""

"""Faults of a run, found and responded to: ranks that disagree, bad steps, silent corruption, slow and lost ranks.

It also saves in the background, and keeps copies of state and checkpoints.
"""

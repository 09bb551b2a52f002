"""Searches every layout that a number of GPUs can train a config in, drops what does not fit, and ranks the rest."""

"""Search over every layout that can train a config on some GPUs: drop what does not fit, and rank the rest."""

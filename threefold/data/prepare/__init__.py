"""The work of `threefold data`: prepares, converts, verifies and summarizes token files."""

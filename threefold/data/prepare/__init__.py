"""The work of `threefold data`: prepare, convert, verify and summarize token files."""

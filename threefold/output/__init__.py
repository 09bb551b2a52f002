"""Output that appears whole or not at all, and overwrites only what this program wrote."""

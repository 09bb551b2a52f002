"""Output that appears whole or not at all, and overwrites nothing that this program did not write."""

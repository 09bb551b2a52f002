"""Tests of parity that need Threefold: the scoreboard's small GPT."""

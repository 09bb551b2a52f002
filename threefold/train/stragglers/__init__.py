"""Stragglers: ranks that take longer for the same work than the others, which wait for them."""

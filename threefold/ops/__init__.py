"""Faster kernels for the same arithmetic."""

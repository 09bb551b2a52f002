"""Verification: compares losses, and gradients and weights of each parameter, of a layout with one process."""

"""Verification: compares a layout with a single process, losses, gradients and weights of each parameter."""

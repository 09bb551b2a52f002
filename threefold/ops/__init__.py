"""Faster kernels for operations that torch has: linear layers, attention and cross-entropy on a CPU; and activation
functions by name."""

"""Transports for CPU ranks: shared memory between the ranks of one host, and gloo for tensors of a GPU."""

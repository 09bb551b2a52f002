"""Tensor files of a checkpoint and their index: version 2, which is written, and version 1, which is only read."""

"""Saving beside the training: host copies of the state, the thread that writes them, copies at `fsspec` addresses."""

"""Dry run: the training code of one rank of a large layout, in one process and on tensors without memory."""

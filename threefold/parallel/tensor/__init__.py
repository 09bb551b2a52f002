"""Tensor and sequence parallelism: layers whose weights or activations are sharded over the tp axis."""

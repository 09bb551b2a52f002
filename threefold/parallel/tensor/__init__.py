"""Tensor and sequence parallelism: layers with weights or activations sharded over the tp axis."""

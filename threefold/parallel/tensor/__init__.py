"""Tensor and sequence parallelism: layers whose weights are split."""

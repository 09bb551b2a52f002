"""What a training step takes: seconds of matrix products, memory-bound work, collectives, pipeline and optimizer."""

"""Low-rank adapters (LoRA) of a model whose other weights are frozen."""

"""Token files, one module per format: Threefold, Megatron-LM, PaddleFleetX, and JSON lines with a token cache."""

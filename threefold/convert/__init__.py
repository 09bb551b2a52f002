"""Converters: configs of Megatron-LM, PaddleFleetX and Colossal-AI, token files, texts, and checkpoints."""

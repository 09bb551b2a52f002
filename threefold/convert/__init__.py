"""Converters: configs of Megatron-LM, PaddleFleetX and Colossal-AI, token files, and checkpoints in other formats."""

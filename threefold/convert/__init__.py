"""Converters of configs of Megatron-LM, PaddleFleetX and Colossal-AI."""

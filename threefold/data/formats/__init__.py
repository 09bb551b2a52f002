"""Data formats: token files of Threefold, Megatron-LM and PaddleFleetX, JSON lines, and custom data sets."""

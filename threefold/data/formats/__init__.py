"""Data formats: token files of Threefold, Megatron-LM and PaddleFleetX, JSON lines, and data sets of a user's own."""

"""Mapping of Hugging Face configs and weights for all families, without torch; used by `threefold.huggingface`."""

"""What a family says of Hugging Face's format, as data and functions without torch; threefold/huggingface uses it."""

"""What all families need to map Hugging Face configs and weights, without torch; used by `threefold.huggingface`."""

"""Llama, Mistral, Mixtral and Qwen."""

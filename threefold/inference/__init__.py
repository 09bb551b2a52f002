"""Inference with a trained model in any tp × pp layout: text generation, and evaluation on texts."""

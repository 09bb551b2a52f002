"""Threefold: train GPT-style language models in any data × tensor × pipeline layout, with the same result."""

__version__ = "0.1.0"

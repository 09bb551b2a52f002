"""Text: reading sources, the tokenizer, and encoding documents as tokens."""

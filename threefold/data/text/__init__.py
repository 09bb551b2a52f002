"""Text: reads sources, trains and opens tokenizers, and encodes documents as tokens."""

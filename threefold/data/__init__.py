"""Text to token files to batches: everything between the user's corpus and the training step.

`sources` reads text; `tokenizer`, `conversations` and `encoding` turn documents into tokens, `preparation` writes
and `formats` reads them as a `corpus`. `samples` divides and mixes documents, `packed` cuts them into samples,
`loader` makes a rank's batches, and `dataset` opens everything that a config names.
"""

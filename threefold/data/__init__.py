"""Text to token files to batches: everything between the user's corpus and the training step.

`sources` reads text; `tokenizer`, `chat_template` and `encoding` turn documents into tokens. `preparation` writes token
files, and `formats` reads them, one module per token format. `samples` assigns documents to train, valid and test, and
`packed` cuts them into samples; `mixture` blends corpora. The sampler is a keyed permutation
(`threefold.random`). `loader` makes a rank's batches, and `dataset` opens everything that a config names.
"""

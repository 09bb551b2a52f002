"""Text to token files to batches: everything between the user's corpus and the training step.

`sources` reads text; `tokenizer`, `conversations` and `encoding` turn documents into tokens. `preparation` writes token
files, and `formats` reads them, one module per token format, each as a `corpus`. `samples` assigns documents to train,
valid and test and blends corpora, and `packed` cuts documents into samples. The sampler is a keyed permutation
(`threefold.random`). `loader` makes a rank's batches, and `dataset` opens everything that a config names.
"""

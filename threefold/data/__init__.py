"""Text to token files to batches: everything between the user's corpus and the training step.

`text` and `chat` turn documents into tokens, `prepare` writes token files, and `formats` reads them, one module per
token format. `split` assigns documents to train, valid and test; `packed_samples`, `packed_conversations` and
`padded_samples` cut them into samples; `mixture` blends corpora; the sampler is a keyed permutation
(`threefold.random.permutation`); `loader` makes the batches of a rank, and `dataset` is all that a config names.
"""

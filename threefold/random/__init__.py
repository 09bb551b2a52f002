"""Random numbers that are a function of what they are for: Philox streams, keyed permutation, dropout keys."""

"""Random numbers that follow from a key in every layout: Philox, the keyed permutation, dropout masks."""

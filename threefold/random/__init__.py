"""Random numbers that are keyed, and thus equal in every layout: Philox, the keyed permutation, dropout masks."""

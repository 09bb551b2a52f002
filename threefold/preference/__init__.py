"""Training on preferences: pairs of a chosen and a rejected answer, their loss, and reference log-probabilities."""

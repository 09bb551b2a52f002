"""Steps whose loss or gradient is not finite, or a spike: where that began, and what follows (stop, skip, rollback)."""

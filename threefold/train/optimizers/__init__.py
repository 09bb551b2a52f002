"""Optimizers, one file each; each one has a row in `config.optimizer.BUILT_IN`."""

"""Optimizers, one file each; `config.optimizer.BUILT_IN` has a row for every one of them."""

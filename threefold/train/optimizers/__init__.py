"""Built-in optimizers, with a row each in `config.optimizer.BUILT_IN`; in `own`, any `torch.optim.Optimizer`."""

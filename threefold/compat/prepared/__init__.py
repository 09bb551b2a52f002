"""Distribution of a model, its optimizers and its loaders in one call (`prepare`), in the style of `accelerate`."""

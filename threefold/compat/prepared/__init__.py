"""Calls in the style of `accelerate`: `prepare` for models, optimizers and loaders, `notebook_launcher` for ranks."""

"""Training: the training loop and its step, optimizers, learning-rate schedules, callbacks and evaluation."""

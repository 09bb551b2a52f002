"""Any layout against one process: weights, losses and gradients, parameter by parameter."""

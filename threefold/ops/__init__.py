"""Linear layers, attention and cross-entropy with the gradients that training needs; activation functions by name."""

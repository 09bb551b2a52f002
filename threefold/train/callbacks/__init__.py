"""What watches a run: console, metrics, plots, TensorBoard."""

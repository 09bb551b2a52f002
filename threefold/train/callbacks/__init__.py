"""Training callbacks: console output, step log, metrics file, loss curve, TensorBoard, and those of other packages."""
